"""`bough gateway` that can be asked where its CPU time goes, for `bough bench gateway`.

Run as `python -m bough.bench.gateway_sampled FOLDER SETTINGS`: settings as a JSON object; profiles go through FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from bough.bench.sampled import offer_profiles
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.service import run_gateway


def main() -> None:
    folder, settings = sys.argv[1:]
    offer_profiles(Path(folder))
    run_gateway(msgspec.json.decode(settings, type=GatewaySettings))


if __name__ == "__main__":
    main()
