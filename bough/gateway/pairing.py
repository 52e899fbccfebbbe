"""Prompts and answers on different engines: which prefill engine computes the prompt of a request.

The decode engine gets the request, with the address of the prefill engine in it, and brings it there itself. So a
request has one answer, one connection and one owner, as without a pair. Where no prefill engine is left, the decode
engine computes the prompt.
"""

import time
from urllib.parse import urlsplit

import msgspec

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.call import Call
from bough.gateway.policy_table import PolicyChoice, PolicyTable
from bough.gateway.registry import Registry
from bough.gateway.responses import AttemptFailedError
from bough.gateway.resume import with_fields
from bough.gateway.worker import Lease

PAIRED_PATHS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
UNAVAILABLE = "PrefillUnavailableError"  # a decode engine's word for a prefill engine that has failed it


class Pairing:
    def __init__(self, registry: Registry, settings: GatewaySettings) -> None:
        self._registry = registry
        policy = settings.prefill_policy or settings.policy or "cost"
        self.policies = PolicyTable(PolicyChoice(policy, settings.options_of(policy)), registry.knows)
        registry.listen(self.policies)

    def lease(self, call: Call, decode: Lease) -> Lease | None:
        """A prefill engine for the attempt at `decode`, which is called back when that engine is lost."""
        now_s = time.monotonic()
        candidates = [
            worker
            for worker in self._registry.prefills(call.peek.model)
            if worker.id not in call.tried_prefills and worker.admits(now_s)
        ]
        if not candidates:
            return None
        policy = self.policies.of(call.peek.model)
        choice = policy.choose(candidates, call.peek.routing)
        worker = next(worker for worker in candidates if worker.id == choice.worker_id)
        policy.routed(worker.id, call.peek.routing)
        worker.breaker.begin(now_s)
        lease = Lease(worker, lambda: None, choice.prefill_tokens)
        lease.partner = decode
        return lease

    def failed(self, call: Call, prefill: Lease, failure: AttemptFailedError) -> AttemptFailedError:
        """Ends the lease of a failed attempt. What the prefill engine is to blame for is tried with another at once."""
        if UNAVAILABLE in failure.error_words:
            call.tried_prefills |= {prefill.worker.id}
            prefill.fail(failure.reason)
            return AttemptFailedError("its prefill engine is gone", 503, moved=True)
        if prefill.called_back:
            call.tried_prefills |= {prefill.worker.id}
        prefill.abandon()
        return failure


def paired_body(body: bytes, prefill: Lease | None) -> bytes:
    """The request, with the place where its prompt is computed, which is not for clients to choose."""
    place: dict[str, object] = dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"))
    if prefill is not None:
        worker = prefill.worker
        place |= {"bootstrap_host": urlsplit(worker.url).hostname, "bootstrap_port": worker.bootstrap_port}
    return with_fields(body, msgspec.json.encode(place)[1:-1])
