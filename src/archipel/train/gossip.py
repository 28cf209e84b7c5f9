"""One gossip peer's tensors: its model, what it remembers of rounds, and the offers at hand (GASLoC).

What a live trainer, the simulator and replay have in common: `PeerState.act` carries out one action of the
peer's machine and returns the event that answers it, `payload` the bytes that travel beside a message. The
mathematics is `numerics.mixing`, on one flat float32 vector of everything that is synchronised.

Running statistics are mixed and never extrapolated: momentum and outer learning rate act on parameters only.
A model kept in less than float32 keeps the rest of its float32 anchor beside it, so that rounding is not
taken for learning.

Invariants: float32 on the CPU, terms in the order of the actions, so that equal actions and payloads give
equal bits; tensors kept or sent are never changed in place; a payload that fails its checks leaves no trace.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import ModelError, PayloadError
from ..numerics import codec, mixing
from ..protocol import gossip as g
from ..protocol.messages import Action, Event, Message
from ..protocol.schedule import SyncOptions
from .held import Facts, Held, Round, Sum
from .parameters import Parameters, unflatten

log = logging.getLogger("archipel")

WHOLE = SyncOptions(fragments=1)
BLOCK = 2  # float32 and bf16 have no scales; the codec asks for a block all the same
CHUNK = 1 << 20  # elements that are in float64 at once
FACTS, THETA, REMEMBERED, OWED, MOMENTS = "facts", "theta", "remembered", "owed", "moments"


class PeerState:
    """The tensors of one peer. `evaluate`: returns the model's validation loss, if there is data for it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: g.GossipOptions,
        evaluate: Callable[[], float] | None = None,
    ) -> None:
        self.options = options
        self.steps = 0  # inner steps behind these weights; whoever steps counts them
        self._optimizer, self._evaluate = optimizer, evaluate
        self._parameters = Parameters(model, WHOLE)
        self.schema = self._parameters.schema
        [self.numel] = self._parameters.numels
        pieces = self._parameters.fragments[0].pieces
        self._buffers = [slice(p.offset, p.offset + p.stop - p.start) for p in pieces if p.kind == "buffer"]
        self.owed: Tensor | None = None  # of late changes, what is still to be added
        self._lost: Tensor | None = None  # of the anchor, what a less precise model cannot hold
        self._rounds: dict[int, Round] = {}
        self._captured: dict[tuple[int, str], np.ndarray] = {}
        self._final: np.ndarray | None = None
        self._sum: tuple[int, Sum] | None = None
        self._mean: Tensor | None = None
        self.anchor = self._read()
        self.remembered = mixing.start(options.form, self.anchor)

    # ---- what hosts ask ----

    def act(self, action: Action, payload: Any = None) -> Event | None:
        """Carry out an action of the machine; return the event that answers it, if there is one.

        payload: what came with the event the action answers. Raises PayloadError for a mean that is none.
        """
        match action:
            case g.Offer(round=number):
                return self.offer(number)
            case g.Take(round=number, worker=worker):
                if reason := self.take(number, worker, payload):
                    log.warning("offer left out round=%d worker=%s reason=%r", number, worker, reason)
            case g.Mix(round=number, workers=workers, weights=weights):
                return self.mix(number, workers, weights)
            case g.Correct(round=number, worker=worker, weight=weight, rounds=rounds):
                return self.correct(number, worker, weight, rounds)
            case g.Drop(round=number):
                self.drop(number)
            case g.Capture(round=number, worker=worker):
                return self.capture(number, worker)
            case g.Adopt(round=number):
                return self.adopt(number, payload)
            case g.Submit(attempt=attempt):
                return self.submit(attempt)
            case g.Gather(attempt=attempt, worker=worker):
                return self.gather(attempt, worker, payload)
            case g.Average(attempt=attempt, members=members, losses=losses):
                return self.average(attempt, members, losses)
            case g.Accept(digest=digest):
                self.accept(digest, payload)
        return None

    def payload(self, to: str, message: Message) -> np.ndarray | None:
        """Return the bytes that travel beside a message, None if nothing does. Not to be changed."""
        match message:
            case g.Model(round=number):
                found = self._rounds[number].payload
                assert found is not None, f"the offer of round {number} is gone"
                return found
            case g.State(round=number):
                return self._captured.pop((number, to))
            case g.Final():
                return self._final
            case g.Mean():
                assert self._mean is not None
                return _bytes_of(self._mean)
            case _:
                return None

    @property
    def offer_bytes(self) -> int:
        """Length of an offer on the wire."""
        return codec.encoded_bytes(self.options.codec, self.numel, BLOCK)

    @property
    def model_bytes(self) -> int:
        """Length of a final model, and of the mean."""
        return 4 * self.numel

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the model that the machine knows, the anchor, as whole float32 tensors by name."""
        return unflatten([self.anchor.numpy()], self._parameters.fragments, self.schema)

    def load(self, vector: Tensor) -> None:
        """Start anew from these weights, (numel,) float32, with nothing remembered of rounds."""
        self.anchor, self.remembered, self.owed = vector, mixing.start(self.options.form, vector), None
        self._rounds.clear()
        self._write(vector)

    def digest(self) -> str:
        """Return xxh3 of the anchor."""
        return _digest(self.anchor)

    def held(self) -> Held:
        """Return what `hold` goes on from, given a model and an optimizer as they are now."""
        return Held(
            steps=self.steps,
            anchor=self.anchor,
            remembered=self.remembered,
            owed=self.owed,
            lost=self._lost,
            rounds=self._rounds,
            captured=self._captured,
            final=self._final,
            sum=self._sum,
            mean=self._mean,
        )

    def hold(self, held: Held) -> None:
        """Go on from `held`; the tensors are ours from then on."""
        self.steps, self._lost = held.steps, held.lost
        self.anchor, self.remembered, self.owed = held.anchor, held.remembered, held.owed
        self._rounds, self._captured = held.rounds, held.captured
        self._final, self._sum, self._mean = held.final, held.sum, held.mean

    # ---- a round ----

    def offer(self, number: int) -> g.Offered:
        """Make this peer's side of the round from where its steps have led."""
        options, reached = self.options, self.reached()
        made = mixing.offer(
            options.form,
            self.anchor,
            reached,
            self.remembered,
            lr=options.outer_lr,
            momentum=options.momentum,
        )
        for part in self._buffers:
            made.sent[part] = reached[part]
        del reached
        if not codec.finite(made.sent.numpy()):
            raise ModelError(
                f"this peer's weights hold NaN or Inf after round {number}: nothing of it was sent; look at "
                "its loss and its hardware, and start it again: it takes over a sound peer's state"
            )
        sent, payload = made.sent, _bytes_of(made.sent)
        if options.codec != "float32":
            payload = codec.encode(options.codec, made.sent.numpy(), BLOCK)
            sent = torch.from_numpy(codec.decode(options.codec, payload, self.numel, BLOCK))
        kept = self._round(number)
        kept.own, kept.payload, kept.sent = made, payload, sent
        return g.Offered(number, xxhash.xxh3_64_hexdigest(payload.data))

    def take(self, number: int, worker: str, payload: Any) -> str:
        """Keep a partner's offer; return why it cannot be used, or ""."""
        try:
            self._round(number).received[worker] = self._decoded(self.options.codec, payload)
        except PayloadError as error:
            return str(error)
        return ""

    def mix(self, number: int, workers: tuple[str, ...], weights: tuple[float, ...]) -> g.Mixed:
        """Settle the round with the offers that were kept of these workers, in this order."""
        kept = self._rounds[number]
        made, sent = kept.own, kept.sent
        assert made is not None and sent is not None, f"round {number} is settled already, or was not offered"
        usable = [(kept.received[w], x) for w, x in zip(workers, weights, strict=True) if w in kept.received]
        offers, shares = [offer for offer, _ in usable], [weight for _, weight in usable]
        mixed = made.sent
        if offers:
            exact = self.options.codec == "float32"
            mixed = mixing.mix(made.sent, offers, shares, sent=None if exact else sent)
        theta, self.remembered = mixing.settle(made, mixed)
        if theta is not mixed:
            for part in self._buffers:
                theta[part] = mixed[part]
        self.anchor = theta = self._paid(theta)
        self._write(theta)
        kept.own = kept.payload = None
        distances = [_in_chunks(mixing.squared_distance, made.sent, offer) for offer in offers]
        distance = math.fsum(distances) / len(distances) if distances else -1.0
        for worker in workers:
            kept.received.pop(worker, None)
        return g.Mixed(number, distance, _square(made.sent), _digest(theta))

    def _paid(self, theta: Tensor) -> Tensor:
        """Return the weights with a round's share of what is owed; what is remembered moves with them."""
        if self.owed is None:
            return theta
        share = mixing.owed_share(self.options.form, self.options.momentum)
        if self.options.form != "drift":  # which remembers no place
            self.remembered = torch.add(self.remembered, self.owed, alpha=share)
        theta = torch.add(theta, self.owed, alpha=share)
        self.owed = self.owed * (1.0 - share)
        return theta

    def correct(self, number: int, worker: str, weight: float, rounds: int) -> g.Corrected:
        """Apply a kept offer of an earlier round in delta form. rounds: settled since."""
        kept = self._rounds.get(number, Round())
        received = kept.received.pop(worker, None)
        if received is not None and kept.sent is not None:
            change = mixing.change(received, weight, sent=kept.sent)
            late = mixing.late(self.options.form, self.options.momentum, rounds=rounds)
            shift = change * late.on_weights
            for part in self._buffers:
                shift[part] = change[part]
            reached = self.reached() + shift
            self.anchor = self.anchor + shift
            self.remembered = torch.add(self.remembered, change, alpha=late.on_remembered)
            if late.owed:
                for part in self._buffers:
                    change[part] = 0.0
                more = change * late.owed
                self.owed = more if self.owed is None else self.owed + more
            self._write(reached)
        return g.Corrected(number, worker, self.digest())

    def drop(self, number: int) -> None:
        """Forget what was kept for rounds before this one."""
        for old in [known for known in self._rounds if known < number]:
            del self._rounds[old]
        for key in [key for key in self._captured if key[0] < number]:
            del self._captured[key]

    # ---- the whole state ----

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the state's tensors by name. They share memory with the optimizer, which changes its own."""
        found = {THETA: self.anchor.numpy(), REMEMBERED: self.remembered.numpy()}
        found |= {OWED: self.owed.numpy()} if self.owed is not None else {}
        for key, value in self._moments().items():
            if isinstance(value, Tensor):
                tensor = value.detach().cpu()
                found[key] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return found

    def facts(self, number: int) -> dict[str, Any]:
        """Return what goes with `arrays`, as plain data. number: the round the peer stands at."""
        scalars = {k: float(v) for k, v in self._moments().items() if not isinstance(v, Tensor)}
        return msgspec.to_builtins(Facts(self.options.form, number, self.steps, scalars))  # type: ignore[no-any-return]

    def restore(self, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> int:
        """Take over a state; return its round. PayloadError, with nothing changed, if it is of another model.

        The arrays are ours from then on.
        """
        try:
            said = msgspec.convert(facts, Facts)
        except msgspec.ValidationError as error:
            raise PayloadError(f"its facts are none: {error}") from None
        if said.form != self.options.form:
            raise PayloadError(f"it is of form {said.form!r}, this run's is {self.options.form!r}")
        theta, remembered = (self._vector(arrays, name) for name in (THETA, REMEMBERED))
        owed = self._vector(arrays, OWED) if OWED in arrays else None
        moments = self._checked_moments(arrays, said.scalars)
        self.anchor, self.remembered, self.owed, self.steps = theta, remembered, owed, said.steps
        self._rounds.clear()
        self._write(theta)
        if self._optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
        return said.round

    def capture(self, number: int, worker: str) -> g.Captured:
        """Copy the whole state, a safetensors file in memory, for a peer that becomes a clone of this one."""
        facts = np.frombuffer(msgspec.json.encode(self.facts(number)), np.uint8)
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays().items()}
        blob = safetensors.numpy.save({FACTS: facts, **arrays})
        self._captured[number, worker] = np.frombuffer(blob, np.uint8)
        return g.Captured(number, worker)

    def adopt(self, number: int, payload: Any) -> g.Adopted:
        """Become a clone of the peer whose captured state this is, or say why not."""
        try:
            arrays = safetensors.numpy.load(bytes(payload))
            facts = msgspec.json.decode(arrays.pop(FACTS).tobytes())
            if facts["round"] != number:
                return g.Adopted(number, f"it is of round {facts['round']}, not {number}")
            self.restore(arrays, facts)
        except (SafetensorError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            return g.Adopted(number, f"it is no captured state: {type(error).__name__}: {error}")
        except PayloadError as error:
            return g.Adopted(number, str(error))
        return g.Adopted(number)

    def _moments(self) -> dict[str, Any]:
        """Return the optimizer's state by name: tensors and numbers. ModelError if it holds anything else."""
        found: dict[str, Any] = {}
        state = {} if self._optimizer is None else self._optimizer.state_dict()["state"]
        for index, entries in state.items():
            for key, value in entries.items():
                if not isinstance(value, Tensor | int | float):
                    raise ModelError(
                        f"the optimizer's state {key!r} is a {type(value).__name__}: a peer's state "
                        "travels to peers that come in, as tensors and numbers; use another optimizer"
                    )
                found[f"{MOMENTS}/{index}/{key}"] = value
        return found

    def _checked_moments(
        self, arrays: dict[str, np.ndarray], scalars: dict[str, float]
    ) -> dict[int, dict[str, Any]]:
        """Return an optimizer's state from what came, as far as it can be checked before it is loaded."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        sizes = [parameter.numel() for group in groups for parameter in group["params"]]
        found: dict[int, dict[str, Any]] = {}
        for name, value in (*arrays.items(), *scalars.items()):
            if name in (THETA, REMEMBERED, OWED):
                continue
            where, _, rest = name.partition("/")
            index, _, key = rest.partition("/")
            if where != MOMENTS or not index.isdecimal() or not key or int(index) >= len(sizes):
                raise PayloadError(f"it has a tensor {name!r} that this peer's optimizer has no place for")
            array = np.asarray(value)
            if array.size > max(sizes[int(index)], 1) or not np.isfinite(array).all():
                raise PayloadError(f"its tensor {name!r} of shape {array.shape} is too large or not finite")
            found.setdefault(int(index), {})[key] = _owned(value) if isinstance(value, np.ndarray) else value
        return found

    # ---- the end ----

    def submit(self, attempt: int) -> g.Submitted:
        """Copy the model after the last round; evaluate it if there is data for it."""
        self._final = _bytes_of(self.anchor)  # no copy: an anchor is replaced, never changed
        return g.Submitted(attempt, -1.0 if self._evaluate is None else self._evaluate())

    def gather(self, attempt: int, worker: str, payload: Any) -> g.Gathered:
        """Add a member's final model to the sum; None: one's own. What is not finite is left out."""
        if self._sum is None or self._sum[0] != attempt:
            self._sum = attempt, Sum(torch.zeros(self.numel, dtype=torch.float64))
        gathered = self._sum[1]
        try:
            model = self._decoded("float32", _bytes_of(self.anchor) if payload is None else payload)
        except PayloadError:
            gathered.refused.append(worker)
        else:
            gathered.total += model
            gathered.squares[worker] = _square(model)
        return g.Gathered(attempt, worker)

    def average(self, attempt: int, members: tuple[str, ...], losses: tuple[float, ...]) -> g.Averaged:
        """Make the mean of the members' models, with what is known of it and of them.

        consensus_error: the root of mean ‖θ_i − mean θ‖² over ‖mean θ‖, for a sum and lengths tell no more;
        it is never below `mixing.consensus_error`, the mean of the norms.
        """
        assert self._sum is not None and self._sum[0] == attempt
        gathered = self._sum[1]
        count = len(gathered.squares)
        assert {*gathered.squares, *gathered.refused} == {*members}, (gathered.squares, members)
        mean = gathered.total / count if count else self.anchor.double()  # nothing better is left
        length = float(torch.dot(mean, mean))
        spread = max(math.fsum(gathered.squares.values()) / max(count, 1) - length, 0.0)
        self._mean, self._sum = mean.float(), None
        figures: dict[str, Any] = {"model_bytes": self.model_bytes}
        if gathered.refused:
            figures["left_out"] = sorted(gathered.refused)
        figures["consensus_error"] = math.sqrt(spread / length) if length else 0.0
        known = [loss for loss in losses if loss >= 0]
        if known:
            figures["val_loss_mean"] = math.fsum(known) / len(known)
            figures["val_loss_worst"] = max(known)
        if self._evaluate is not None:
            self._write(self._mean)
            figures["val_loss_mean_model"] = self._evaluate()
            self._write(self.anchor)
        return g.Averaged(attempt, _digest(self._mean), figures)

    def accept(self, digest: str, payload: Any) -> None:
        """Take the mean as this peer's model; None: the one made here. PayloadError if it is another."""
        mean = self._mean
        if payload is not None:
            mean = torch.from_numpy(codec.decode("float32", payload, self.numel, BLOCK))
        if mean is None or (found := _digest(mean)) != digest:
            raise PayloadError(f"a mean model of digest {found if mean is not None else None}, not {digest}")
        self._mean = self.anchor = mean
        self._write(mean)

    # ---- vectors ----

    def _round(self, number: int) -> Round:
        return self._rounds.setdefault(number, Round())

    def _decoded(self, name: str, payload: Any) -> Tensor:
        values = codec.decode(name, payload, self.numel, BLOCK)
        if not codec.finite(values):
            raise PayloadError("a model that holds NaN or Inf: nothing of it is used")
        return torch.from_numpy(values)

    def _vector(self, arrays: dict[str, np.ndarray], name: str) -> Tensor:
        array = arrays.get(name)
        if array is None or array.dtype != np.float32 or array.shape != (self.numel,):
            raise PayloadError(f"its {name} is not a float32 vector of {self.numel} elements")
        if not codec.finite(array):
            raise PayloadError(f"its {name} holds NaN or Inf")
        return _owned(array)

    def _read(self) -> Tensor:
        values = np.empty(self.numel, np.float32)
        self._parameters.read(0, values)
        return torch.from_numpy(values)

    def reached(self) -> Tensor:
        """Return where the steps have led, with what the model could not hold of its start."""
        values = self._read()
        return values if self._lost is None else values.add_(self._lost)

    def _write(self, weights: Tensor) -> None:
        self._parameters.write(0, weights.numpy())
        if self._parameters.rounded():
            self._lost = weights - self._read()


def _owned(array: np.ndarray) -> Tensor:
    """Return an array as a tensor that may be written to."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _bytes_of(vector: Tensor) -> np.ndarray:
    """Return a vector's own memory as bytes."""
    return vector.numpy().view(np.uint8)


def _digest(vector: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(vector.numpy().data)


def _square(vector: Tensor) -> float:
    """Return the squared norm, summed in float64."""
    return _in_chunks(lambda one, _: float(torch.dot(one.double(), one.double())), vector, vector)


def _in_chunks(measure: Callable[[Tensor, Tensor], float], one: Tensor, other: Tensor) -> float:
    """Return the sum of a measure over pieces, so that float64 copies stay small."""
    starts = range(0, len(one), CHUNK)
    return math.fsum(measure(one[s : s + CHUNK], other[s : s + CHUNK]) for s in starts)
