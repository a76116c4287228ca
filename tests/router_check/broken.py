"""Routers that each break one part of the contract, and some that break none."""

from __future__ import annotations

import torch

from trserve import BaseRouter, Parameter
from trserve.router_lib.signals import normalized_entropy


class Sound(BaseRouter):
    """R-Stitch without its hysteresis."""

    parameters = (Parameter("tau", "entropy", default=0.06, minimum=0.0, maximum=1.0),)

    def score(self, result):
        return normalized_entropy(result.logits, self.context.tokenizer_size)

    def route(self, result):
        entropy, tau = self.score(result), result.params["tau"]
        return (entropy > tau if self.model == 0 else entropy <= tau).long()


class Timid(Sound):
    """Sound, but with a threshold that most entropies never reach."""

    parameters = (Parameter("tau", "entropy", default=0.9, minimum=0.9, maximum=1.0),)


class OutOfRange(Sound):
    def route(self, result):
        return super().route(result) * 2


class TooFewRows(Sound):
    def route(self, result):
        return super().route(result)[:-1]


class Raises(Sound):
    """For one row now and then."""

    def route(self, result):
        for request in result.requests:
            if request.committed_len - request.prompt_len == 9 and request.prompt_len % 2:
                raise ZeroDivisionError("nine")
        return super().route(result)


class Writes(Sound):
    def route(self, result):
        found = super().route(result)
        result.logits.div_(2.0)
        return found


class Lowers(Sound):
    """Its parameter, which is then another one in the next step."""

    def route(self, result):
        result.params["tau"].mul_(0.5)
        return super().route(result)


class AdmitsHalf(Sound):
    def admit(self, req):
        return 0.5 * self.model


class AdmitsBoth(Sound):
    def admit(self, req):
        return torch.ones(2)


class WrongLoc(Sound):
    def send(self, req, token):
        peer_req = super().send(req, token)
        peer_req.loc += 2
        return peer_req


class TooMuchToSay(Sound):
    def send(self, req, token):
        peer_req = super().send(req, token)
        peer_req.extras = bytes(65)
        return peer_req


class CannotReceive(Sound):
    def receive(self, peer_req):
        raise KeyError(peer_req.rid)


class AdmitsNobody(Sound):
    def admit(self, req):
        return 7


class Forgetful(Sound):
    """Counts its own steps by request, which a worker that is restarted cannot know."""

    def __init__(self, context):
        super().__init__(context)
        self._steps = {}

    def route(self, result):
        found = []
        for request in result.requests:
            steps = self._steps[request.rid] = self._steps.get(request.rid, 0) + 1
            found.append(int(steps % 5 == 0 or self.model == 1))
        return found


class Social(Sound):
    """Asks the whole batch."""

    def route(self, result):
        entropy = self.score(result)
        above = entropy > entropy.mean() + 0.01
        return above.long() if self.model == 0 else [1] * len(entropy)


class Moody(Sound):
    """Another mood for every instance and request."""

    moods = 0

    def __init__(self, context):
        super().__init__(context)
        Moody.moods += 1
        self._mood = Moody.moods

    def route(self, result):
        if self.model == 1:
            return [1] * len(result.requests)
        draws = [hash((self._mood, r.committed_len)) % 10 for r in result.requests]
        return [int(draw == 0) for draw in draws]


class KeepsAtWhim(Sound):
    """Whether ``send`` keeps the token depends on how often it was asked."""

    asked = 0

    def send(self, req, token):
        KeepsAtWhim.asked += 1
        peer_req = super().send(req, token)
        if self.model == 0:
            peer_req.keep_token = KeepsAtWhim.asked % 7 == 0
        return peer_req


class DeafToRequests(Sound):
    """Only listens to the server."""

    def route(self, result):
        entropy, tau = self.score(result), self.context.config["tau"]
        return (entropy > tau if self.model == 0 else entropy <= tau).long()


class ScoresInPairs(Sound):
    def score(self, result):
        entropy = super().score(result)
        return torch.stack([entropy, entropy])

    def route(self, result):
        return [int(self.model == 1)] * len(result.requests)


class PingPong(BaseRouter):
    """Always leaves and never keeps: ends only because the runtime sees to it."""

    def route(self, result):
        return [1] * len(result.requests)

    def send(self, req, token):
        peer_req = super().send(req, token)
        peer_req.keep_token = False
        return peer_req


class CannotStart(BaseRouter):
    def __init__(self, context):
        raise FileNotFoundError("weights.bin")

    def route(self, result):
        return [0] * len(result.requests)


class Hasty(Sound):
    """Says that it needs no result, and looks at one."""

    decides_early = True

    def route(self, result):
        return [int(token % 3 == 0) for token in result.token_ids.tolist()]


class Peeking(Sound):
    """Says the same, and looks at the token just sampled in the row."""

    decides_early = True

    def route(self, result):
        return [int(request.token_ids[-1] % 3 == 0) for request in result.requests]


class Late(Sound):
    """Says the same, and fails without logits."""

    decides_early = True

    def route(self, result):
        return [int(row.argmax() % 3 == 0) for row in result.logits]


class Unfortunate(Sound):
    """Looks at nothing of a result indeed, and fails for one row now and then."""

    decides_early = True

    def route(self, result):
        if any(request.committed_len - request.prompt_len == 9 for request in result.requests):
            raise ZeroDivisionError("nine")
        return [request.committed_len % 2 for request in result.requests]
