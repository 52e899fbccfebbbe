"""`bough build-kernels`: compiles the CPU kernels in place, for where the installation could not."""

from collections.abc import Sequence

from bough.cli.commands import Parser
from bough.core.errors import ResourceError
from bough.native.build import BuildError
from bough.native.library import build_library


def run(argv: Sequence[str]) -> int:
    about = "Compiles the CPU kernels with the C compiler of this machine ($CC, or cc, gcc or clang)."
    Parser(program="bough build-kernels", about=about).parse(argv)
    try:
        print(build_library())
    except BuildError as error:
        raise ResourceError(str(error)) from None
    return 0
