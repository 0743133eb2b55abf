"""What the rest of the library needs from a model: logits, several gradients from one forward pass,
passes counted.

A model is any callable from a batch `(n, *shape)` to logits `(n, K)`. Nothing about it is changed
for good: modules are put in eval mode and their parameters frozen for the time of an attack, and
both are restored whatever happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wassail.device import take
from wassail.errors import InputError, ModelWarning, reason_of, remedies
from wassail.losses import flip_tolerance, magnitude, need, predict, strongest_rival
from wassail.progress import Progress, Tick, progress_bar
from wassail.specification import Labels, Specification, labels_of, specification_of
from wassail.threat import Boxes, Domain, boxes_of
from wassail.threat import whole as whole_number

Model: TypeAlias = Callable[[Tensor], Tensor]
CHANNELS = (1, 3, 4)  # of images
BATCH_SIZE = 250  # AutoAttack's default; no model call ever sees more rows than the batch size


@contextlib.contextmanager
def frozen(model: Model) -> Iterator[None]:
    """Eval mode and no gradients of parameters, which cost time and memory; restored at the end."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)


def mixed(model: Model, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model with gradients in mixed precision: its logits are the model's own to the last bit,
    only gradients are rounded.

    Where a gradient may be asked for, the model is called twice: as it is for the logits, and under
    autocast to `dtype` (bfloat16 or float16) on the device of the batch for the graph. Every
    decision is therefore taken in the model's precision. Passes are counted as if it were one call.
    Inputs in float64 are left alone by autocast.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise InputError(
            f"mixed precision in {name_of(dtype)} is not possible: choose bfloat16 or float16."
        )
    return _Mixed(model, dtype)


class _Mixed(nn.Module):
    def __init__(self, model: Model, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.model(x)
        if not torch.is_grad_enabled():
            return z
        with torch.autocast(x.device.type, self.dtype):
            rough = self.model(x)
        grafted: Tensor = _Graft.apply(z, rough)  # type: ignore[no-untyped-call]
        return grafted


class _Graft(torch.autograd.Function):
    """One tensor's value with another's gradient: a sum `z + (rough - rough)` would be NaN
    where `rough` overflows.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, rough: Tensor) -> Tensor:
        ctx.dtype = rough.dtype
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)


def device_of(model: Model, default: torch.device) -> torch.device:
    """Where the model's parameters and buffers live; if it shows none, `default`."""
    shown = (
        itertools.chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    )
    return next((tensor.device for tensor in shown), default)


def as_taken(model: Model, x: Tensor) -> Tensor:
    """Samples in the floating type of the model, if it refuses their own or answers in float64.

    Tables are float64 as a rule, and models float32. A model that takes both, or shows no type of
    its own, gets the samples as they are.

    Args:
        model: a callable from a batch to logits.
        x: samples `(N, *shape)` in float32 or float64.
    """
    shown = (
        itertools.chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    )
    types = {tensor.dtype for tensor in shown if tensor.is_floating_point()}
    if len(types) != 1 or x.dtype in types or not len(x):
        return x
    (wanted,) = types
    if wanted not in (torch.float32, torch.float64):
        return x
    with torch.no_grad(), frozen(model):
        try:
            z: Any = model(x[:1].to(device_of(model, x.device)))
        except RuntimeError:
            return x.to(wanted)
    # What such a model does with a sample, and with a point near it, is done in float64.
    return x.double() if getattr(z, "dtype", None) == torch.float64 else x


def versions() -> dict[str, str]:
    """The versions a result depends on, recorded in every result."""
    return {
        "wassail": _own_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache
def _own_version() -> str:
    return metadata.version("wassail")  # reads a file, which may be replaced while we run


def sample_keys(x: Tensor) -> list[int]:
    """A number for each of N samples that depends on its content alone. Random starts are keyed
    by it, so that a sample gets the same start wherever it stands.
    """
    digests = (
        hashlib.sha256(sample.contiguous().numpy().tobytes()).digest()
        for sample in x.detach().cpu()
    )
    return [int.from_bytes(digest[:6], "little") for digest in digests]


def generators(x: Tensor, seed: int, number: int = 0) -> list[torch.Generator]:
    """A generator on the CPU for each of N samples, keyed by (seed, its content, number)."""
    keys = (((seed * 1_000_003 + key) * 1_009 + number) % 2**63 for key in sample_keys(x))
    return [torch.Generator().manual_seed(key) for key in keys]


def check_model(model: Model, x: Tensor, y: Labels) -> None:
    """Look at the answer to a few samples: shape, finiteness, determinism. Call it `frozen`."""
    if len(x) == 0:
        return
    if not callable(model):
        raise InputError(
            f"the model is a {type(model).__name__}: give a callable from a batch to logits, for "
            "example what ws.zoo.load returns."
        )
    few = x[:8].to(device_of(model, x.device))
    z = first_logits(model, few, specification_of(y))
    with torch.no_grad():
        again = model(few)
    if isinstance(y, Specification):
        y.check_outputs(z.shape[1])
    else:
        _check_classes(z, y)
    if (again - z).abs().max() > 1e-4 * z.abs().max():
        warnings.warn(
            "the model gives different logits for the same input: its accuracies are those of "
            "lucky draws, so fix its randomness or average it over repeats.",
            ModelWarning,
            stacklevel=2,
        )


def _check_classes(z: Tensor, y: Tensor) -> None:
    """Refuse labels that the model has no class for, and probabilities in the place of logits."""
    if int(y.min()) < 0 or int(y.max()) >= z.shape[1]:
        raise InputError(
            f"the labels range over {int(y.min())}..{int(y.max())} but the model has "
            f"{z.shape[1]} classes: labels must be 0..{z.shape[1] - 1}."
        )
    inside = (z >= 0).all() and ((z.sum(1) - 1).abs() < 1e-4).all()
    if inside and ((z > 0) & (z < 1)).any():  # exact one-hot rows are no softmax
        raise InputError(
            "the model returns probabilities: give it without its final softmax, attacks need "
            "logits."
        )


def first_logits(model: Model, x: Tensor, specification: Specification | None = None) -> Tensor:
    """Logits `(n, K)` of a few samples, or one sentence that says why the model refuses them.

    Args:
        model: a callable from a batch to logits.
        x: a few samples `(n, *shape)`, where the model lives.
        specification: in the place of labels; then one output is enough.
    """
    with torch.no_grad():
        try:
            rows = torch.arange(len(x))
            return Network(model, rows, specification=specification).forward(x)
        except (RuntimeError, TypeError) as error:
            raise _refused(model, x, reason_of(error)) from error


def _refused(model: Model, x: Tensor, reason: str) -> InputError:
    """Why a model refuses samples: the usual causes by their names."""
    halves = (torch.float16, torch.bfloat16)
    shown = model.parameters() if isinstance(model, nn.Module) else ()
    half = next((tensor.dtype for tensor in shown if tensor.dtype in halves), None)
    if half is not None:
        return remedies(
            f"the model is in half precision ({name_of(half)}) and refuses samples in "
            f"{name_of(x.dtype)}",
            "load it in float32, with model.float()",
            "save it in float32",
        )
    cause = f"the model does not accept samples of shape {tuple(x.shape)}"
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        return remedies(
            f"{cause}, which look like images with the channels last (NHWC)",
            "put the channels first, with x.permute(0, 3, 1, 2)",
            "save them with the channels first (NCHW), or as 8-bit images, which are turned",
        )
    return InputError(
        f"{cause}: {reason}; give samples of the shape it takes, or repair its forward pass."
    )


class Network:
    """A model during one attack on a chunk of samples: every forward and backward pass is counted
    for its sample.

    `rows` says which of the samples a batch belongs to: an index `(n,)`, repeated where a sample
    has several candidates. The counts `forwards` and `backwards` `(size,)` live where the samples
    do, so that counting never waits for the device.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        batch_size: int = BATCH_SIZE,
        device: torch.device | None = None,
        home: torch.device | None = None,
        dtype: torch.dtype | None = None,
        specification: Specification | None = None,
    ) -> None:
        """Serve some samples of the data set.

        Args:
            model: from a batch to logits.
            ids: places of the samples in the whole data set, `(size,)`, on the CPU.
            batch_size: the most rows of one call of `logits`.
            device: where the model lives.
            home: where the samples live, with the model by default.
            dtype: of the samples, which says what rounding a flip must survive; by default that of
                the logits.
            specification: of these samples; then `logits` and `tape` give its logits, whose
                class 0 is right, in the place of the model's outputs.
        """
        self.model = model
        self.specification = specification
        self.sizes: Tensor | None = None  # of the margins at the samples, see `measure`
        self.ids = ids
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype
        size = len(ids)
        home = home or device
        self.rows = torch.arange(size, device=home)
        self.forwards = torch.zeros(size, dtype=torch.int64, device=home)
        self.backwards = torch.zeros(size, dtype=torch.int64, device=home)
        self.scale = torch.zeros(size, device=home)  # of the logits at the samples, see `measure`
        self.calls = 0  # no sample has been in more calls than this, unless a call repeats it

    def part(self, rows: Tensor) -> Network:
        """Some of the samples, with counts of their own, where the model lives."""
        goal = self.specification
        if goal is not None:
            goal = goal.take(rows).to(self.device or rows.device)
        found = Network(self.model, rows.cpu(), self.batch_size, self.device, specification=goal)
        if self.sizes is not None:
            found.sizes = self.sizes[rows.to(self.sizes.device)]
        return found

    def boxes(self, domain: Domain, x: Tensor) -> Domain:
        """The domain of these samples `(size, *shape)` out of that of the whole data set, in their
        type; one box, or none, as it is.
        """
        known = boxes_of(domain)
        if known is None:
            return domain
        shared = known.low.ndim < x.ndim or len(known.low) == 1
        own = known if shared else Boxes(known.low[self.ids], known.high[self.ids])
        return own.fit(x).like(x)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """One checked call of the model, `(n, *shape) -> (n, K)`; counts nothing."""
        try:
            z: Any = self.model(x)
        except (InputError, RuntimeError, TypeError, MemoryError):
            raise  # of a model that takes other samples, see `check_model`
        except Exception as error:  # the code of the user's own may raise anything
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            said = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            raise InputError(
                f"the model fails on samples of shape {tuple(x.shape)} with {said}; repair its "
                "forward pass, or the shape of the samples."
            ) from error
        if not isinstance(z, Tensor):
            raise remedies(
                f"the model returns a {type(z).__name__}, not a tensor of logits",
                "wrap it, for example `lambda x: model(x)[0]` or `lambda x: model(x).logits`",
                "name the logits by their key, attribute or place, for example --logits 0",
            )
        if z.ndim != 2 or len(z) != len(x):
            raise InputError(
                f"the model maps {tuple(x.shape)} to {tuple(z.shape)}: logits have shape (N, "
                "classes)."
            )
        if z.shape[1] < 2 and self.specification is None:
            raise remedies(
                "the model has one output, and a classifier needs at least two logits",
                "use ws.OneLogit(model) if it is positive for class 1, or a ws.Specification in "
                "the place of labels; evaluate takes tolerance=0.5 for a regression and "
                "threshold=0.5 for a probability",
                "add --one-logit if it is positive for class 1, --threshold T if it is above T "
                "there, or --tolerance T for a regression that may be off by less than T",
            )
        if z.dtype.is_complex:
            raise InputError("the model returns complex numbers: logits are real, take .real.")
        if z.dtype == torch.float64 and x.dtype == torch.float32:
            raise remedies(
                "the model answers float32 samples in float64",
                "give it the samples in float64, with x.double()",
                "save the samples as float64",
            )
        return z if z.dtype in (torch.float32, torch.float64) else z.float()

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits `(n, K)` in calls of at most `batch_size` rows. One forward a row."""
        found = self.outputs(x, rows)
        return self._judged(found, rows) if len(x) else found

    def outputs(self, x: Tensor, rows: Tensor) -> Tensor:
        """The model's own outputs `(n, K)`, specification or not. One forward a row."""
        self._count(self.forwards, rows)
        with torch.no_grad():
            parts = (x[i : i + self.batch_size] for i in range(0, len(x), self.batch_size))
            found = [self.forward(part.to(self.device or x.device)).to(x.device) for part in parts]
            return torch.cat(found) if found else x.new_zeros(0, 2)

    def _judged(self, z: Tensor, rows: Tensor) -> Tensor:
        """Outputs as logits: those of the specification if there is one."""
        if self.specification is None:
            return z
        some = self.specification.take(rows)
        if self.sizes is None and len(rows) == len(self.rows):  # the first call is at the samples
            self.sizes = some.sizes(z).to(z)
        return some.logits(z)

    def tape(self, x: Tensor, rows: Tensor) -> Tape:
        """A differentiable pass at `x`. One forward a row; gradients are counted when asked."""
        self._count(self.forwards, rows)
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_(True)
            z = self._judged(self.forward(x), rows)
        if not z.requires_grad:
            raise InputError(
                "the model's logits do not depend differentiably on its input: remove "
                "torch.no_grad, detach or numpy from its forward pass."
            )
        return Tape(self, x, z, rows)

    def measure(self, clean: Tensor) -> None:
        """Remember the size of the logits `(size, K)` at the samples: flips are judged by it."""
        self.scale = magnitude(clean).to(self.forwards.device)
        if self.sizes is not None:
            self.scale = torch.maximum(self.scale, self.sizes.to(self.scale))

    def need(self, z: Tensor, rows: Tensor, times: float = 1.0) -> Tensor:
        """The lead `(m,)` that makes a flip at logits `(m, K)` of samples, `times` so much."""
        scale = self.scale.index_select(0, rows.to(self.scale.device)).to(z)
        return need(z, times * flip_tolerance(self.dtype or z.dtype), scale)

    def predict(self, z: Tensor, y: Tensor, rows: Tensor, tolerance: float | None = None) -> Tensor:
        """The classes `(m,)` at logits `(m, K)` of samples with labels `(m,)`. A wrong class counts
        if it leads by the tolerance, by default the one for flips that this library stores.
        """
        tolerance = flip_tolerance(self.dtype or z.dtype) if tolerance is None else tolerance
        return predict(z, y, tolerance, self.scale[rows.to(self.scale.device)].to(z))

    def flipped(
        self, z: Tensor, y: Tensor, scale: Tensor, target: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whether `predict` says another class than `y`, or says the target if there is one, bool
        `(m,)`; the strongest other class, `(m,)`; and by how much it leads, `(m,)`. scale: that of
        `measure` at the samples.
        """
        best, rival = strongest_rival(z, y)
        tolerance = flip_tolerance(self.dtype or z.dtype)
        lead = best - z.gather(1, y[:, None])[:, 0]
        wrong = lead >= need(z, tolerance, scale)
        return wrong if target is None else wrong & (rival == target), rival, lead

    def _count(self, counter: Tensor, rows: Tensor) -> None:
        self.calls += 1
        rows = rows.to(counter.device)
        counter.index_add_(0, rows, torch.ones_like(rows))


@dataclass
class Tape:
    """A forward pass whose graph is kept: `z` are its logits with their graph, `logits` without."""

    network: Network
    x: Tensor
    z: Tensor
    rows: Tensor
    # The strongest class but the label and by how much it leads, where a tracker has looked.
    rival: Tensor | None = None
    lead: Tensor | None = None

    @cached_property
    def logits(self) -> Tensor:
        """The logits, `(n, K)`."""
        return self.z.detach()

    def strongest(self, y: Tensor) -> Tensor:
        """The class with the largest logit but `y` `(n,)`, `(n,)`."""
        return strongest_rival(self.logits, y)[1] if self.rival is None else self.rival

    def leads(self, y: Tensor, rivals: Tensor | None = None) -> Tensor:
        """`theta_j - theta_y` for rivals j `(n,)`, by default the strongest at each row: `(n,)`."""
        if rivals is None and self.lead is not None:
            return self.lead
        z = self.logits
        j = self.strongest(y) if rivals is None else rivals
        return (z.gather(1, j[:, None]) - z.gather(1, y[:, None]))[:, 0]

    def gradients(
        self, y: Tensor, rivals: Tensor, keep: Tensor | None = None, again: bool = False
    ) -> Tensor:
        """Gradients of the logit differences `theta_j - theta_y` at the rows `keep`: `(k,), (k, J)
        -> (k, J, *shape)`.

        `keep` `(k,)`: rows of the tape, all by default. One backward a rival and row, see `pull`. A
        loop over rivals is fastest on a CPU. again: keep the graph for another call.
        """
        count = rivals.shape[1]
        found = []
        for j in range(count):
            weight = self.z.new_zeros(y.shape[0], self.z.shape[1])
            weight.scatter_(1, rivals[:, j : j + 1], 1.0).scatter_(1, y[:, None], -1.0)
            found.append(self.pull(weight, keep, again=again or j < count - 1))
        return found[0][:, None] if count == 1 else torch.stack(found, 1)

    def pull(self, weight: Tensor, keep: Tensor | None = None, again: bool = False) -> Tensor:
        """Gradients of `<weight_i, theta>` at the rows `keep`, all by default: `(k, K), (k,) ->
        (k, *shape)`.

        One backward for every row of the tape is what is executed. Ask even where none is kept, or
        counts depend on the batch. again: keep the graph; without it this call is the last.
        """
        if keep is not None and keep.shape[0] == self.x.shape[0]:
            keep = None
        self.network._count(self.network.backwards, self.rows)
        if keep is not None:
            weight = torch.zeros_like(self.z).index_copy(0, keep, weight)
        # A number, not a vector with weights: for these torch loads sympy, which takes 0.7 s.
        with torch.enable_grad():
            weighted = (self.z * weight).sum()
        (gradient,) = torch.autograd.grad(weighted, self.x, retain_graph=again)
        return gradient if keep is None else gradient.index_select(0, keep)


class Batch:
    """The samples of a chunk that an iterative attack still moves.

    A sample that is wrong already is never in it, and one that is done leaves it. Where a sample
    has one candidate, that is its next iterate: the forward pass that judges it serves its
    gradient, too.

    Args:
        network: of the chunk.
        x: its samples, `(N, *shape)`.
        y: their labels, `(N,)`.

    clean: logits at all samples, `(N, K)`. Of the n samples in the batch: rows, their places
    `(n,)`; x, their iterates `(n, *shape)`; y, their labels `(n,)`.
    """

    def __init__(self, network: Network, x: Tensor, y: Tensor) -> None:
        tape = network.tape(x, network.rows)
        self.network = network
        self.clean = tape.logits
        network.measure(self.clean)
        self.rows = (predict(self.clean, y) == y).nonzero()[:, 0]
        self.x = x[self.rows]
        self.y = y[self.rows]
        self._size = len(x)
        self._tape: Tape | None = tape  # of all samples, for the first gradients
        self._gradients: Tensor | None = None  # at the iterates, if they are known already

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def done(self) -> float:
        """The share of the chunk's samples that are not in the batch."""
        return 1 - len(self) / self._size

    def gradients(self, rivals: Tensor) -> Tensor:
        """`grad (theta_j - theta_y)(x)` at the iterates, `(n, J) -> (n, J, *shape)`.

        The first ones are executed, and counted, for all samples of the chunk: ask for them even
        where none is in the batch, or counts depend on the chunk.
        """
        if self._tape is not None:
            found = self._tape.gradients(self.y, rivals, self.rows)
            self._tape = None
            return found
        if self._gradients is not None:
            return self._gradients
        if not len(self):
            return self.x[:, None].expand(-1, rivals.shape[1], *self.x.shape[1:])
        return self.network.tape(self.x, self.rows).gradients(self.y, rivals)

    def logits(self, phi: Tensor, rivals: Tensor, last: bool) -> Tensor:
        """The logits at candidates `phi`, `(n, J, *shape) -> (n, J, K)`.

        rivals `(n, J)`: what the next gradients are for; last: no gradients are asked for again.
        """
        many = phi.shape[1]
        flat, rows = phi.flatten(0, 1), self.rows.repeat_interleave(many)
        if many == 1 and not last:
            tape = self.network.tape(flat, rows)
            self._gradients = tape.gradients(self.y, rivals)
            return tape.logits[:, None]
        self._gradients = None
        return self.network.logits(flat, rows).reshape(len(self), many, -1)

    def flipped(self, z: Tensor) -> Tensor:
        """Which logits `(n, J, K)` are those of another class than the label, bool `(n, J)`."""
        many = z.shape[1]
        rows, y = (value.repeat_interleave(many) for value in (self.rows, self.y))
        return (self.network.predict(z.flatten(0, 1), y, rows) != y).reshape(len(self), many)

    def move(self, x: Tensor, leave: Tensor, rivals: Tensor) -> Tensor:
        """Go on from `x` `(n, *shape)` without the samples that leave, bool `(n,)`; the rivals of
        the others.
        """
        keep = (~leave).nonzero()[:, 0]
        self.rows, self.x, self.y, rivals = take(keep, self.rows, x, self.y, rivals)
        if self._gradients is not None:
            self._gradients = self._gradients[keep]
        return rivals


@dataclass(frozen=True)
class Search:
    """What an attack brings home for N samples, every point re-verified by a forward pass of its
    own (`checks`).

    points: `(N, *shape)`; clean, predicted: predicted class at the sample and at its point, `(N,)`,
    a point's wrong only beyond the flip tolerance; forwards, backwards, checks: passes, `(N,)`.
    """

    points: Tensor
    clean: Tensor
    predicted: Tensor
    forwards: Tensor
    backwards: Tensor
    checks: Tensor


ChunkAttack: TypeAlias = Callable[[Network, Tensor, Tensor, Tick], "tuple[Tensor, Tensor]"]
Further: TypeAlias = Callable[[float], "tuple[Tensor, Tensor]"]
# Rounding of another batch may take back a flip on the boundary: shares of its way that it goes on.
SHARES_FURTHER = (1e-4, 1e-3, 1e-2)


def search(
    attack: ChunkAttack,
    model: Model,
    x: Tensor,
    y: Labels,
    batch_size: int | None = None,
    progress: Progress = False,
    description: str = "attack",
    tolerance: float | None = None,
    whole: bool = False,
    further: Further | None = None,
) -> Search:
    """Run `attack(network, x, y, tick) -> (points, clean logits)` over chunks of checked data, then
    verify its points.

    Samples are independent, so results do not depend on the chunks. `tick` takes the share of the
    chunk that is done. A point counts as wrong if it is wrong by the tolerance, by default the one
    for flips that this library stores. whole: one chunk for an attack that needs statistics of all
    samples; it gets them where they are and streams batches to the network's device itself. With a
    specification in the place of labels an attack sees its logits, and the label 0 (see `Network`).
    further: of the last chunk the points moved on by a share of their way, and which of them were
    flips when they were found, bool `(n,)`; asked where the verification finds one to be none.
    """
    batch_size = BATCH_SIZE if batch_size is None else whole_number(batch_size, "batch_size")
    device = device_of(model, x.device)
    goal, right = specification_of(y), labels_of(y)
    tolerance = flip_tolerance(x.dtype) if tolerance is None else tolerance
    parts: list[tuple[Tensor, ...]] = []
    with frozen(model), progress_bar(progress, description) as report:
        check_model(model, x, y)
        size, home = (max(len(x), 1), x.device) if whole else (batch_size, device)
        for start in range(0, len(x), size):
            chunk = x[start : start + size].to(home)
            ids = torch.arange(start, start + len(chunk))
            own = None if goal is None else goal.take(ids).to(home)
            labels = right[start : start + size].to(home)
            network, checker = (
                Network(model, ids, batch_size, device, home, x.dtype, own) for _ in range(2)
            )

            def tick(share: float, start: int = start, size: int = len(chunk)) -> None:
                report((start + share * size) / len(x))

            points, clean = attack(network, chunk, labels, tick)
            if not torch.isfinite(clean).all():
                bad = start + int((~torch.isfinite(clean)).any(1).nonzero()[0])
                raise InputError(
                    f"the model returns NaN or infinity at sample {bad}: check its weights and "
                    "preprocessing."
                )
            checker.sizes = network.sizes
            z = checker.logits(points, checker.rows)
            # A sample that was wrong before anything moved is not a flip and needs no tolerance.
            at_clean = predict(clean, labels)
            checker.measure(clean)
            at_point = checker.predict(z, labels, checker.rows, tolerance)
            if further is not None:
                points, at_point = _flipped_again(checker, points, at_point, labels, further)
            unmoved = (points == chunk).flatten(1).all(1)
            at_point = torch.where(unmoved, at_clean, at_point)
            back = (t.to(x.device) for t in (points, at_clean, at_point))
            spent = (
                count.cpu() for count in (network.forwards, network.backwards, checker.forwards)
            )
            parts.append((*back, *spent))
            tick(1.0)
    if not parts:
        none = torch.zeros(0, dtype=torch.int64)
        classes = none.to(x.device)
        return Search(x.clone(), classes, classes, none, none, none)
    return Search(*(torch.cat(column) for column in zip(*parts)))


def _flipped_again(
    checker: Network, points: Tensor, predicted: Tensor, y: Tensor, further: Further
) -> tuple[Tensor, Tensor]:
    """The points, those that are flips no more moved on until they are, and their classes."""
    for share in SHARES_FURTHER:
        moved, known = further(share)
        lost = (known & (predicted == y)).nonzero()[:, 0]
        if not lost.shape[0]:
            break
        trial, labels = take(lost, moved, y)
        found = checker.predict(checker.logits(trial, lost), labels, lost)
        points = points.index_copy(0, lost, trial)
        predicted = predicted.index_copy(0, lost, found)
    return points, predicted


def name_of(dtype: torch.dtype) -> str:
    """A type's name without its module."""
    return str(dtype).removeprefix("torch.")
