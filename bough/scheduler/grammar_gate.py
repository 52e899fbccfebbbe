"""Where requests with a grammar wait until it has been compiled; all others pass them by.

Owns the requests at the gate and their tickets. Compiling happens elsewhere (`bough.constrained`); a turn of the loop
only looks whether something is done. A grammar that is refused, or takes too long, ends its own request and no other.
"""

from collections.abc import Sequence

import msgspec

from bough.constrained.interface import Compiled, Ticket, spec_of
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.sampling_params import SamplingParams
from bough.scheduler.constraint import Constraint
from bough.scheduler.ports import Grammars
from bough.scheduler.request import Request

STRANGE_OUTPUT = FinishAbort(
    "resume.output_ids does not follow the request's grammar; resume with the request that was sent first.",
    field="resume.output_ids",
)
POLL_S = 0.002  # between two looks when there is nothing else to do


class GrammarGate(dict[Request, Ticket]):
    """The requests and their tickets: put one in, `leave` if it is aborted meanwhile, `passed` for those that may go
    on."""

    def __init__(self, grammars: Grammars | None, eos_ids: Sequence[int], *, any_whitespace: bool) -> None:
        super().__init__()
        self._grammars = grammars
        self._eos_ids = tuple(eos_ids)
        self._any_whitespace = any_whitespace

    def ticket(self, sampling: SamplingParams) -> Ticket | None:
        """Asks for the grammar of a request, if it has one; a `RequestError` for what can never pass."""
        if not sampling.constrained:
            return None
        if self._grammars is None:
            raise RequestError(
                "This engine has no tokenizer (--skip-tokenizer-init), so it cannot follow a grammar; leave "
                f"{sampling.grammar_field} out.",
                field=sampling.grammar_field,
            )
        return self._grammars.request(spec_of(sampling, self._any_whitespace))

    def leave(self, request: Request) -> None:
        """Nobody waits for this request's grammar any more."""
        self.pop(request).cancel()

    def passed(self) -> list[tuple[Request, FinishAbort | None]]:
        """The requests whose grammars are done, with the reason where they are refused."""
        done = [request for request, ticket in self.items() if ticket.done]
        return [(request, self._open(request, self.pop(request))) for request in done]

    def _open(self, request: Request, ticket: Ticket) -> FinishAbort | None:
        try:
            compiled = ticket.result()
        except RequestError as error:
            field = None if error.field is None else request.sampling.grammar_field
            return msgspec.structs.replace(FinishAbort.because(error), field=field)
        request.constrain(self._constraint(request, compiled))
        return None if self._replay(request) else STRANGE_OUTPUT

    def pass_by(self, request: Request) -> None:
        """A request without a grammar; its thinking may have a budget, and there may be words that it must not say."""
        if request.bad_words or (request.thinking is not None and request.thinking.budget is not None):
            request.constrain(self._constraint(request, None))
            self._replay(request)

    def _replay(self, request: Request) -> bool:
        """Steps over what a resumed request has generated already; False when its grammar does not allow that."""
        assert request.constraint is not None
        return all(map(request.constraint.accept, request.tokens[request.prompt_len :].tolist()))

    def _constraint(self, request: Request, compiled: Compiled | None) -> Constraint:
        beside = request.stop_ids, self._eos_ids, request.thinking, request.bad_words
        return Constraint(compiled, request.sampling, *beside)
