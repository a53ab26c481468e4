"""Training on one device: the loop, what it reaches and what it costs. The oracle of later lessons.

    set_seed(0)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = fit(model, make_loader(digits(), 64, seed=0), optimizer, epochs=6)
    evaluate(model, make_loader(digits(train=False), 256))

Nothing in this module communicates: a rank that calls it works on its own model and batches.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_lab.figures.style import INK, card, rank_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> the batch's mean loss, one number
Batches = Iterable[tuple[Tensor, Tensor]]  # a DataLoader, or a list of (images, labels)
Clock = Callable[[], float]  # seconds

CPU = torch.device("cpu")
COLOUR = rank_colour(0)  # one device alone is rank 0


# The model and its starting point


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch on every device; ask cuDNN for kernels that repeat exactly.

    The same call on every rank gives every rank the same model. Raises ValueError below 0.
    """
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, not {seed}")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def small_cnn(classes: int = 10, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two convolutions and a linear layer for images of (1, 8, 8): 9,930 parameters.

    It has neither BatchNorm nor dropout, so a sample's gradient does not depend on the others in
    its batch. That is what makes shards of a batch add up to the batch exactly.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),  # (batch, 16, 8, 8)
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),  # (batch, 32, 4, 4)
        nn.ReLU(),
        nn.Flatten(),  # (batch, 512)
        nn.Linear(512, classes),  # (batch, classes)
    ).to(dtype)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's parameters live. Raises ValueError when it has none."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters, so there is nothing to train")
    return parameter.device


# What training reaches


@dataclass(frozen=True)
class Score:
    """Loss and accuracy over some samples, kept as sums: scores of parts add up to the whole's.

    Averages would not add up, since a part of 2 samples would count as much as a part of 64.
    """

    loss_sum: float = 0.0
    correct: int = 0
    samples: int = 0

    @classmethod
    def of(cls, outputs: Tensor, labels: Tensor, mean_loss: Tensor) -> Score:
        """One batch's score. outputs: (batch, classes); labels: (batch,); mean_loss: one number."""
        correct = int(outputs.argmax(dim=1).eq(labels).sum())
        return cls(mean_loss.item() * len(labels), correct, len(labels))

    def __add__(self, other: Score) -> Score:
        return Score(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.samples + other.samples,
        )

    @property
    def loss(self) -> float:
        """Mean loss a sample. Raises ValueError when there were no samples."""
        return self.loss_sum / self._counted()

    @property
    def accuracy(self) -> float:
        """Fraction that is right, 0 to 1. Raises ValueError when there were no samples."""
        return self.correct / self._counted()

    def _counted(self) -> int:
        if self.samples == 0:
            raise ValueError("no samples were scored, so they have no mean")
        return self.samples

    def __repr__(self) -> str:
        if self.samples == 0:
            return "no samples"
        right = f"{self.correct} of {self.samples}"
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.3f} ({right})"


def evaluate(model: nn.Module, loader: Batches, loss_fn: Loss = F.cross_entropy) -> Score:
    """Score the model in eval mode, without gradients; each module's mode is put back afterwards.

    An empty loader gives an empty score: a rank without samples still has something to add.
    """
    device, score = device_of(model), Score()
    with eval_mode(model), torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            check_outputs(outputs, labels)
            score += Score.of(outputs, labels, loss_fn(outputs, labels))
    return score


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the `with`, and in its own earlier mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # not model.train(): a frozen layer must stay frozen
            module.training = training


def check_outputs(outputs: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless outputs is (batch, two classes or more) and labels is (batch,)."""
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        raise ValueError(
            "the model gives one logit a sample; cross-entropy over one class is 0 and trains "
            "nothing. Give it two outputs, or use binary_cross_entropy_with_logits in your own loop"
        )
    if outputs.ndim != 2 or labels.shape != outputs.shape[:1]:
        raise ValueError(
            "expected outputs of (batch, classes) and labels of (batch,), "
            f"not {tuple(outputs.shape)} and {tuple(labels.shape)}"
        )


# The loop


def train_step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: Optimizer,
    loss_fn: Loss = F.cross_entropy,
) -> Score:
    """One step on one batch; the score is the batch's before the step."""
    outputs = model(images)  # (batch, classes)
    check_outputs(outputs, labels)
    loss = loss_fn(outputs, labels)  # the mean over the batch
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return Score.of(outputs, labels, loss)


def fit(
    model: nn.Module,
    loader: Batches,
    optimizer: Optimizer,
    epochs: int = 1,
    *,
    loss_fn: Loss = F.cross_entropy,
    warmup: int = 3,
    clock: Clock = time.perf_counter,
) -> History:
    """Train for some epochs, on the device where the model is, in the dtype that it has.

    loader: batches of (images, labels), moved to that device. loss_fn: a mean over the batch.
    warmup: steps that the throughput leaves out. Puts the model in train mode.
    Raises ValueError for no epochs, no batches, or an optimizer of another model.
    """
    device = device_of(model)
    _check_fit(model, loader, optimizer, epochs)
    reset_peak_memory(device)
    history = History(Throughput(warmup, device, clock))
    model.train()
    for _ in range(epochs):
        score, start = Score(), clock()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            score += train_step(model, images, labels, optimizer, loss_fn)
            history.throughput.step(len(labels))
        history.add(score, clock() - start)
    history.peak_memory = peak_memory(device)
    return history


def _check_fit(model: nn.Module, loader: Any, optimizer: Optimizer, epochs: int) -> None:
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, not {epochs}")
    if hasattr(loader, "__len__") and len(loader) == 0:
        raise ValueError("the loader has no batches: no samples, or drop_last dropped them")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise ValueError("the optimizer holds none of this model's parameters")


def gradients(
    model: nn.Module, images: Tensor, labels: Tensor, loss_fn: Loss = F.cross_entropy
) -> dict[str, Tensor]:
    """Gradient of the loss by parameter name; the parameters and their .grad stay as they are.

    Frozen parameters are left out, a shared one is listed once, an unused one gets zeros.
    The forward pass still updates buffers, so BatchNorm's running statistics move in train mode.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = loss_fn(model(images), labels)
    values = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, values, strict=True))


# What training costs: samples per second


class Throughput:
    """Samples per second, with the first steps left out: they pay for start-up and caches.

    Call `step(samples)` at the end of each step. It waits for the device first, since a GPU's work
    goes on after the Python call that asked for it has returned.
    """

    def __init__(
        self, warmup: int = 3, device: torch.device = CPU, clock: Clock = time.perf_counter
    ) -> None:
        if warmup < 0:
            raise ValueError(f"warmup must be 0 steps or more, not {warmup}")
        self.warmup, self.device, self.clock = warmup, device, clock
        self.steps = self.samples = 0  # all steps; samples after the warm-up
        self.start = self.end = self._now()

    def _now(self) -> float:
        synchronize(self.device)
        return self.clock()

    def step(self, samples: int) -> None:
        """Count one step on this many samples."""
        self.end = self._now()
        self.steps += 1
        if self.steps <= self.warmup:
            self.start = self.end
        else:
            self.samples += samples

    @property
    def seconds(self) -> float:
        """Time after the warm-up."""
        return self.end - self.start

    @property
    def samples_per_second(self) -> float:
        """Raises ValueError while there is no step beyond the warm-up."""
        if self.steps <= self.warmup:
            raise ValueError(f"{self.steps} steps, {self.warmup} of them warm-up: none to time")
        return self.samples / self.seconds

    def __repr__(self) -> str:
        if self.steps <= self.warmup:
            return f"no step beyond {self.warmup} of warm-up"
        timed = f"{self.samples:,} samples in {self.seconds:.2f} s"
        return f"{self.samples_per_second:,.0f} samples/s ({timed}, {self.warmup} steps left out)"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass
class History:
    """What `fit` saw: a score and a time an epoch, the throughput, the peak memory in bytes.

    The training score of an epoch is taken while the weights move, each batch before its own step.
    """

    throughput: Throughput
    scores: list[Score] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None

    def add(self, score: Score, seconds: float) -> None:
        """Append an epoch. Raises ValueError when it had no samples."""
        if score.samples == 0:
            raise ValueError("no batches came: a generator is used up after one epoch")
        self.scores.append(score)
        self.seconds.append(seconds)

    @property
    def losses(self) -> list[float]:
        """Mean training loss of each epoch."""
        return [score.loss for score in self.scores]

    @property
    def accuracies(self) -> list[float]:
        """Training accuracy of each epoch, 0 to 1."""
        return [score.accuracy for score in self.scores]

    @property
    def samples_per_second(self) -> float:
        """The throughput, warm-up left out."""
        return self.throughput.samples_per_second

    def __repr__(self) -> str:
        rows = ["epoch    loss  accuracy  seconds"]
        for epoch, (score, seconds) in enumerate(zip(self.scores, self.seconds, strict=True), 1):
            rows.append(f"{epoch:5}  {score.loss:6.4f}  {score.accuracy:8.3f}  {seconds:7.2f}")
        rows.append(f"{self.throughput!r} on {self.throughput.device}")
        if self.peak_memory is not None:
            rows.append(f"peak memory {in_bytes(self.peak_memory)}")
        return "\n".join(rows)

    def figure(self) -> Figure:
        """Training loss and accuracy against the epoch."""
        figure, (left, right) = card(columns=2)
        epochs = range(1, len(self.scores) + 1)
        left.plot(epochs, self.losses, "o-", color=COLOUR, clip_on=False)
        left.set(xlabel="epoch", ylabel="training loss (nats a sample)", ylim=(0, None))
        percent = [100 * accuracy for accuracy in self.accuracies]
        right.plot(epochs, percent, "o-", color=COLOUR, clip_on=False)
        right.set(xlabel="epoch", ylabel="training accuracy (%)", ylim=(None, 100))
        return figure


# What training costs: memory


def peak_memory(device: torch.device = CPU) -> int | None:
    """Most bytes in use so far, or None where the system does not tell (Windows).

    On CUDA: what torch held there since `reset_peak_memory`. On the CPU: the whole process's
    resident memory since it began, libraries included; it cannot be reset.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    system = platform.system()
    if system == "Linux":
        # Not getrusage, which also remembers the peak of the process that started this one.
        status = Path("/proc/self/status").read_text().split()
        return 1024 * int(status[status.index("VmHWM:") + 1])
    if system == "Darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return None


def reset_peak_memory(device: torch.device = CPU) -> None:
    """Start a new peak on a CUDA device; nothing on others."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def in_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it: 39720 is '39.7 kB' (1 kB is 1,000 bytes)."""
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


@dataclass(frozen=True)
class StepMemory:
    """Bytes that one training step holds, by what they are for.

    activations: the batch and what forward keeps for backward; they grow with the batch, and
    the other three do not.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int

    @property
    def total(self) -> int:
        """All four."""
        return self.parameters + self.gradients + self.optimizer_state + self.activations

    def __repr__(self) -> str:
        parts = {**vars(self), "total": self.total}
        rows = [f"{name.replace('_', ' '):15} {in_bytes(n):>9}" for name, n in parts.items()]
        return "\n".join(rows)


def step_memory(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    optimizer: Optimizer,
    loss_fn: Loss = F.cross_entropy,
) -> StepMemory:
    """Take one training step and count the tensors it holds, exactly and on any device.

    A tensor saved twice counts once. Not counted: what kernels use for a moment and give back.
    """
    kept: dict[int, int] = {}  # address -> bytes, of what forward keeps for backward
    with torch.autograd.graph.saved_tensors_hooks(lambda t: _note(t, kept), lambda t: t):
        loss = loss_fn(model(images), labels)
        parameters = _sizes(model.parameters())
        activations = {key: size for key, size in kept.items() if key not in parameters}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    grads = _sizes(p.grad for p in model.parameters() if p.grad is not None)
    state = _sizes(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    return StepMemory(*(sum(part.values()) for part in (parameters, grads, state, activations)))


def _note(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
    address = tensor.data_ptr()  # not the storage's: a batch may be a slice of the whole data set
    sizes[address] = max(tensor.nbytes, sizes.get(address, 0))
    return tensor


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        _note(tensor, sizes)
    return sizes


# What training costs: where the time goes


class Phases:
    """Time spent in named phases of a step: `with phases("forward"): ...`.

    Both ends of a phase wait for the device, so a GPU's work counts where it was asked for.
    """

    def __init__(self, device: torch.device = CPU, clock: Clock = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.seconds: dict[str, list[float]] = {}  # phase -> one time for each `with`

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is inside the `with`; what it raises is not timed."""
        synchronize(self.device)
        start = self.clock()
        yield
        synchronize(self.device)
        self.seconds.setdefault(name, []).append(self.clock() - start)

    def skip(self, steps: int) -> None:
        """Forget the first times of every phase: the warm-up."""
        self.seconds = {name: times[steps:] for name, times in self.seconds.items()}

    @property
    def milliseconds(self) -> dict[str, float]:
        """Mean time of each phase."""
        return {name: 1000 * sum(times) / len(times) for name, times in self.seconds.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Each phase's part of the whole; they add up to 1."""
        total = sum(self.milliseconds.values())
        return {name: value / total for name, value in self.milliseconds.items()}

    def __repr__(self) -> str:
        rows = [
            f"{name:10} {value:8.2f} ms  {self.shares[name]:4.0%}"
            for name, value in self.milliseconds.items()
        ]
        return "\n".join([*rows, f"{'whole step':10} {sum(self.milliseconds.values()):8.2f} ms"])

    def figure(self) -> Figure:
        """A bar a phase, in milliseconds a step."""
        figure, axis = card()
        bars = axis.barh(list(self.milliseconds), list(self.milliseconds.values()), color=COLOUR)
        labels = [f"{share:.0%}" for share in self.shares.values()]
        axis.bar_label(bars, labels, padding=4, color=INK)
        axis.set(xlabel="time (ms a step)", ylabel="phase")
        axis.invert_yaxis()  # the first phase on top
        axis.margins(x=0.12)
        return figure


def time_phases(
    model: nn.Module,
    loader: Batches,
    optimizer: Optimizer,
    *,
    loss_fn: Loss = F.cross_entropy,
    warmup: int = 3,
    clock: Clock = time.perf_counter,
) -> Phases:
    """One epoch of `fit`, timed by phase: data, forward, backward, update. It trains the model.

    warmup: steps left out. Raises ValueError unless the loader has more steps than that.
    """
    device, batches = device_of(model), iter(loader)
    phases = Phases(device, clock)
    model.train()
    for _ in range(_steps(loader, warmup)):
        with phases("data"):
            images, labels = next(batches)
            images, labels = images.to(device), labels.to(device)
        with phases("forward"):
            loss = loss_fn(model(images), labels)
        with phases("backward"):
            optimizer.zero_grad()
            loss.backward()
        with phases("update"):
            optimizer.step()
    phases.skip(warmup)
    return phases


def _steps(loader: Any, warmup: int) -> int:
    steps = len(loader)
    if steps <= warmup:
        raise ValueError(f"the loader has {steps} steps, {warmup} of them warm-up: none to time")
    return steps
