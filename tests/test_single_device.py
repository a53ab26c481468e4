"""The oracle of the course, against a loop written by hand, exact sums and a clock of our own."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_lab import single_device
from ddp_lab.datasets import digits, make_loader
from ddp_lab.single_device import (
    History,
    Phases,
    Score,
    StepMemory,
    Throughput,
    device_of,
    eval_mode,
    evaluate,
    fit,
    gradients,
    in_bytes,
    set_seed,
    small_cnn,
    step_memory,
    synchronize,
    time_phases,
    train_step,
)

DTYPES = [torch.float32, torch.float64]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in the lesson; and threads that wait for each other are slow beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_and_optimizer(
    name: str = "sgd", dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[nn.Module, torch.optim.Optimizer]:
    set_seed(seed)
    model = small_cnn(dtype=dtype)
    return model, OPTIMIZERS[name](model.parameters())


def batches(steps: int, size: int = 16, dtype: torch.dtype = torch.float64) -> list:
    """The first `steps` batches of the training images, in order."""
    data = digits(dtype=dtype)
    return [data[i * size : (i + 1) * size] for i in range(steps)]


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[tuple[Tensor, Tensor]]
) -> list[float]:
    """The oracle: nothing of ddp_lab's. Returns each batch's loss."""
    losses = []
    for images, labels in steps:
        for parameter in model.parameters():
            parameter.grad = None
        log_probabilities = model(images).log_softmax(dim=1)
        loss = -log_probabilities[torch.arange(len(labels)), labels].mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class FakeClock:
    """Seconds that pass only when told to, or by `tick` at each reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


# fit


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_twenty_steps_equal_the_loop_by_hand(name: str, dtype: torch.dtype) -> None:
    steps = batches(20, dtype=dtype)
    fitted, optimizer = model_and_optimizer(name, dtype)
    history = fit(fitted, steps, optimizer)
    oracle, oracle_optimizer = model_and_optimizer(name, dtype)
    losses = by_hand(oracle, oracle_optimizer, steps)

    tolerance = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-4}
    start, _ = model_and_optimizer(name, dtype)
    assert not torch.allclose(weights(fitted), weights(start), **tolerance), "it has trained"
    assert weights(fitted).dtype == dtype
    torch.testing.assert_close(weights(fitted), weights(oracle), **tolerance)
    torch.testing.assert_close(
        optimizer.state_dict()["state"], oracle_optimizer.state_dict()["state"], **tolerance
    )
    assert history.losses[0] == pytest.approx(np.mean(losses), abs=tolerance["atol"])


def mutant_sum(model, images, labels, optimizer, loss_fn):
    return train_step(
        model, images, labels, optimizer, lambda o, t: F.cross_entropy(o, t, reduction="sum")
    )


def mutant_keeps_gradients(model, images, labels, optimizer, loss_fn):
    outputs = model(images)
    loss = loss_fn(outputs, labels)
    loss.backward()  # no zero_grad
    optimizer.step()
    return Score.of(outputs, labels, loss)


def mutant_steps_before_backward(model, images, labels, optimizer, loss_fn):
    optimizer.step()  # with the last batch's gradient; the final one is lost
    optimizer.zero_grad()
    outputs = model(images)
    loss = loss_fn(outputs, labels)
    loss.backward()
    return Score.of(outputs, labels, loss)


def mutant_skips_a_batch_of_another_size(model, images, labels, optimizer, loss_fn):
    if len(labels) != 16:
        return Score()
    return train_step(model, images, labels, optimizer, loss_fn)


@pytest.mark.parametrize(
    "mutant",
    [
        mutant_sum,
        mutant_keeps_gradients,
        mutant_steps_before_backward,
        mutant_skips_a_batch_of_another_size,
    ],
)
def test_the_oracle_tells_wrong_loops_apart(mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant runs and trains something; comparing weights after five steps exposes it."""
    images, labels = digits(dtype=torch.float64)[:70]
    steps = list(zip(images.split(16), labels.split(16), strict=True))  # 16, 16, 16, 16, 6
    oracle, optimizer = model_and_optimizer()
    by_hand(oracle, optimizer, steps)

    right, optimizer = model_and_optimizer()
    fit(right, steps, optimizer)
    assert torch.allclose(weights(right), weights(oracle), rtol=0, atol=1e-12)

    monkeypatch.setattr(single_device, "train_step", mutant)
    wrong, optimizer = model_and_optimizer()
    fit(wrong, steps, optimizer)
    assert not torch.allclose(weights(wrong), weights(oracle), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_from_one_seed_are_bitwise_equal(dtype: torch.dtype) -> None:
    def run(seed: int, order: int) -> tuple[Tensor, list[float]]:
        model, optimizer = model_and_optimizer(dtype=dtype, seed=seed)
        history = fit(model, make_loader(digits(dtype=dtype), 64, seed=order), optimizer)
        return weights(model), history.losses

    (first, losses), (again, losses_again) = run(0, 0), run(0, 0)
    assert torch.equal(first, again) and losses == losses_again
    assert not torch.equal(first, run(1, 0)[0]), "another model"
    assert not torch.equal(first, run(0, 1)[0]), "another order"


def test_epochs_go_over_the_loader_again() -> None:
    steps = batches(4)
    model, optimizer = model_and_optimizer()
    history = fit(model, steps, optimizer, epochs=3)
    oracle, oracle_optimizer = model_and_optimizer()
    losses = by_hand(oracle, oracle_optimizer, steps * 3)
    torch.testing.assert_close(weights(model), weights(oracle), rtol=0, atol=1e-12)
    assert history.losses == pytest.approx([np.mean(losses[i : i + 4]) for i in (0, 4, 8)])
    assert history.throughput.steps == 12


def test_small_cnn_learns_the_digits() -> None:
    model, optimizer = model_and_optimizer(dtype=torch.float32)
    test = make_loader(digits(train=False), 256)
    assert evaluate(model, test).accuracy < 0.3
    history = fit(model, make_loader(digits(), 64, seed=0), optimizer, epochs=8)
    assert evaluate(model, test).accuracy > 0.95
    assert history.accuracies[-1] > 0.95 and history.losses[-1] < history.losses[0] / 5


def test_the_epochs_loss_weighs_an_uneven_last_batch_by_its_samples() -> None:
    images, labels = digits(dtype=torch.float64)[:20]
    steps = [(images[:16], labels[:16]), (images[16:], labels[16:])]
    model, _ = model_and_optimizer()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    history = fit(model, steps, still)
    outputs = model(images)
    each = F.cross_entropy(outputs, labels, reduction="none").detach()
    assert history.losses[0] == pytest.approx(each.mean().item(), abs=1e-12)
    mean_of_means = (each[:16].mean() + each[16:].mean()).item() / 2
    assert abs(history.losses[0] - mean_of_means) > 1e-4, "this batch can tell the two apart"
    assert history.accuracies[0] == (outputs.argmax(1) == labels).double().mean().item()


def test_fit_takes_another_loss() -> None:
    def smoothed(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, label_smoothing=0.5)

    (model, optimizer), (plain, plain_optimizer) = model_and_optimizer(), model_and_optimizer()
    history = fit(model, batches(3), optimizer, loss_fn=smoothed)
    fit(plain, batches(3), plain_optimizer)
    assert not torch.allclose(weights(model), weights(plain))
    images, labels = batches(1)[0]
    start, _ = model_and_optimizer()
    first = Score.of(start(images), labels, smoothed(start(images), labels))
    assert evaluate(start, batches(1), smoothed) == first
    assert history.scores[0].samples == 48


def test_fit_trains_in_train_mode() -> None:
    set_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)).double().eval()
    fit(model, batches(2), torch.optim.SGD(model.parameters(), lr=0.1))
    assert model[2].num_batches_tracked == 2 and model.training


def test_fit_leaves_a_frozen_parameter_alone() -> None:
    model, _ = model_and_optimizer()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    fit(model, batches(2), torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(model[0].weight, before) and model[0].weight.grad is None


@pytest.mark.parametrize("epochs", [0, -1])
def test_no_epochs(epochs: int) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=f"epochs must be at least 1, not {epochs}"):
        fit(model, batches(1), optimizer, epochs)


def test_no_batches() -> None:
    model, optimizer = model_and_optimizer()
    few = torch.utils.data.TensorDataset(*digits(dtype=torch.float64)[:5])
    for loader in ([], make_loader(few, 8, drop_last=True)):
        with pytest.raises(ValueError, match="the loader has no batches"):
            fit(model, loader, optimizer)
    with pytest.raises(ValueError, match="no batches"):
        fit(model, iter([]), optimizer)  # has no length to look at


def test_a_generator_that_runs_out_before_the_second_epoch() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="no batches"):
        fit(model, iter(batches(2)), optimizer, epochs=2)


def test_an_optimizer_of_another_model() -> None:
    model, _ = model_and_optimizer()
    _, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="none of this model's parameters"):
        fit(model, batches(1), optimizer)


def test_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        device_of(nn.Flatten())


# The loss that trains nothing


def even(count: int = 64) -> tuple[Tensor, Tensor]:
    """Images, and whether each digit is even: (count, 1), 0.0 or 1.0."""
    images, labels = digits(dtype=torch.float64)[:count]
    return images, (labels % 2 == 0).double().unsqueeze(1)


def test_cross_entropy_on_one_logit_trains_nothing() -> None:
    set_seed(0)
    model = small_cnn(classes=1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, target = even()
    before = weights(model)
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), target)  # runs, and is happy
        loss.backward()
        optimizer.step()
        assert loss.item() == 0
    assert torch.equal(weights(model), before)

    cured = F.binary_cross_entropy_with_logits(model(images), target)
    assert abs(cured.item() - np.log(2)) < 0.1
    cured.backward()
    optimizer.step()
    assert not torch.equal(weights(model), before)


def test_fit_and_evaluate_refuse_one_logit_before_anything_moves() -> None:
    set_seed(0)
    model = small_cnn(classes=1, dtype=torch.float64)
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for call in (lambda: fit(model, [even()], optimizer), lambda: evaluate(model, [even()])):
        with pytest.raises(ValueError, match=r"one logit.*trains\s+nothing.*with_logits"):
            call()
    assert torch.equal(weights(model), before)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (3,)], ids=str)
def test_labels_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    labels = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError) as caught:
        single_device.check_outputs(torch.zeros(4, 10) if shape != (4,) else torch.zeros(4), labels)
    assert "expected outputs of (batch, classes)" in str(caught.value)
    assert str(shape) in str(caught.value)


# Scores


def test_score_of_a_batch() -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
    score = Score.of(outputs, torch.tensor([0, 1, 1]), torch.tensor(0.5))
    assert score == Score(loss_sum=1.5, correct=2, samples=3)
    assert score.loss == 0.5 and score.accuracy == 2 / 3
    assert repr(score) == "loss 0.5000, accuracy 0.667 (2 of 3)"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_scores_of_parts_add_up_to_the_whole(sizes: list[int]) -> None:
    """Any cut, empty parts included; a mean of means would not survive this."""
    count = sum(sizes) or 1
    generator = torch.Generator().manual_seed(count)
    outputs = torch.randn(count, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(5, (count,), generator=generator)

    def score(outputs: Tensor, labels: Tensor) -> Score:
        if len(labels) == 0:
            return Score()
        return Score.of(outputs, labels, F.cross_entropy(outputs, labels))

    total, start = Score(), 0
    for size in sizes if sum(sizes) else [1]:
        total += score(outputs[start : start + size], labels[start : start + size])
        start += size
    whole = score(outputs, labels)
    assert (total.correct, total.samples) == (whole.correct, whole.samples)
    assert total.loss == pytest.approx(whole.loss, abs=1e-12)


def test_no_samples_have_no_mean() -> None:
    assert repr(Score()) == "no samples"
    for mean in (lambda: Score().loss, lambda: Score().accuracy):
        with pytest.raises(ValueError, match="no samples were scored"):
            mean()


# evaluate


@pytest.mark.parametrize("batch_size", [1, 7, 64, 357])
def test_evaluate_does_not_depend_on_the_batch_size(batch_size: int) -> None:
    model, optimizer = model_and_optimizer()
    fit(model, batches(20), optimizer)
    data = digits(train=False, dtype=torch.float64)
    with torch.no_grad():
        outputs = model(data.images)
    score = evaluate(model, make_loader(data, batch_size))
    assert score.correct == (outputs.argmax(1) == data.labels).sum().item()
    assert score.samples == 357
    assert score.loss == pytest.approx(F.cross_entropy(outputs, data.labels).item(), abs=1e-12)


def test_evaluate_uses_eval_mode_and_no_gradients_and_puts_each_mode_back() -> None:
    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return x

    model = nn.Sequential(nn.Flatten(), Spy(), nn.Linear(64, 10), nn.BatchNorm1d(10)).double()
    model.train()
    model[3].eval()  # frozen: must not come back in train mode
    evaluate(model, batches(2))
    assert seen == [(False, False)] * 2
    assert [module.training for module in model] == [True, True, True, False]
    assert model.training and torch.is_grad_enabled()
    assert model[3].num_batches_tracked == 0


def test_modes_come_back_after_an_error() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        assert not model[0].training
        _ = 1 / 0
    assert all(module.training for module in model.modules())


def test_evaluating_nothing_gives_an_empty_score() -> None:
    model, _ = model_and_optimizer()
    assert evaluate(model, []) == Score()


# Gradients


def test_gradients_are_those_of_backward_and_leave_the_model_alone() -> None:
    model, _ = model_and_optimizer()
    images, labels = batches(1)[0]
    before = weights(model)
    result = gradients(model, images, labels)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(weights(model), before)
    F.cross_entropy(model(images), labels).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("cut", [1, 5, 8, 15])
def test_weighted_mean_of_the_parts_gradients_is_the_wholes(cut: int) -> None:
    """What data parallel training rests on. Unweighted, it holds for equal parts alone."""
    model, _ = model_and_optimizer()
    images, labels = batches(1)[0]
    first = gradients(model, images[:cut], labels[:cut])
    second = gradients(model, images[cut:], labels[cut:])
    whole = gradients(model, images, labels)
    weighted = {name: (cut * first[name] + (16 - cut) * second[name]) / 16 for name in whole}
    torch.testing.assert_close(weighted, whole, rtol=0, atol=1e-12)
    plain = {name: (first[name] + second[name]) / 2 for name in whole}
    equal = all(torch.allclose(plain[name], whole[name], rtol=0, atol=1e-6) for name in whole)
    assert equal == (cut == 8)


def test_gradients_with_frozen_shared_and_unused_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 10).double().requires_grad_(False)
            self.first = nn.Linear(10, 10).double()
            self.second = nn.Linear(10, 10).double()
            self.second.weight = self.first.weight
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(self.frozen(x.flatten(1))))

    set_seed(0)
    result = gradients(Odd(), *batches(1)[0])
    assert set(result) == {"unused", "first.weight", "first.bias", "second.bias"}
    assert torch.equal(result["unused"], torch.zeros(3, dtype=torch.float64))
    assert result["first.weight"].abs().max() > 0


# Seeds


def test_set_seed_covers_python_numpy_and_torch() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    set_seed(3)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    set_seed(2**40)  # more than NumPy takes


def test_set_seed_asks_cudnn_to_repeat_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    set_seed(0)
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


def test_small_cnn_is_what_it_says() -> None:
    model = small_cnn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 9930
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert small_cnn(classes=1)(torch.rand(3, 1, 8, 8)).shape == (3, 1)


def test_a_negative_seed() -> None:
    with pytest.raises(ValueError, match="seed must be 0 or more, not -1"):
        set_seed(-1)


# Throughput


def measured(sizes: list[int], seconds: list[float], warmup: int) -> Throughput:
    clock = FakeClock()
    throughput = Throughput(warmup, clock=clock)
    for size, time in zip(sizes, seconds, strict=True):
        clock.now += time
        throughput.step(size)
    return throughput


def test_throughput_counts_samples_and_leaves_the_warm_up_out() -> None:
    throughput = measured([64, 64, 64, 64, 16], [9.0, 3.0, 0.5, 0.5, 0.5], warmup=2)
    assert throughput.samples_per_second == (64 + 64 + 16) / 1.5
    assert (throughput.steps, throughput.samples, throughput.seconds) == (5, 144, 1.5)
    assert repr(throughput) == "96 samples/s (144 samples in 1.50 s, 2 steps left out)"


def test_throughput_without_warm_up_counts_everything() -> None:
    assert measured([10, 30], [1.0, 3.0], warmup=0).samples_per_second == 10


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_throughput_needs_a_step_beyond_the_warm_up(steps: int) -> None:
    throughput = measured([8] * steps, [1.0] * steps, warmup=2)
    with pytest.raises(ValueError, match=f"{steps} steps, 2 of them warm-up"):
        _ = throughput.samples_per_second
    assert repr(throughput) == "no step beyond 2 of warm-up"


def test_negative_warm_up() -> None:
    with pytest.raises(ValueError, match="warmup must be 0 steps or more"):
        Throughput(-1)


class LazyDevice:
    """A device whose work takes its time only when it is waited for, as a GPU's does."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.pending = clock, 0.0

    def wait(self, device: torch.device) -> None:
        assert device == torch.device("meta")
        self.clock.now, self.pending = self.clock.now + self.pending, 0.0


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    device = LazyDevice(FakeClock())
    monkeypatch.setattr(single_device, "synchronize", device.wait)
    return device


def test_throughput_waits_for_the_device(lazy: LazyDevice) -> None:
    lazy.pending = 7.0  # from before the start: not counted
    throughput = Throughput(0, torch.device("meta"), lazy.clock)
    lazy.pending = 2.0
    throughput.step(10)
    assert throughput.samples_per_second == 5


def test_phases_wait_for_the_device_at_both_ends(lazy: LazyDevice) -> None:
    phases = Phases(torch.device("meta"), lazy.clock)
    lazy.pending = 7.0  # from before the phase: not its own
    with phases("forward"):
        lazy.pending += 2.0
    assert phases.milliseconds == {"forward": 2000.0}


def test_fit_measures_the_loader_and_the_steps_with_the_clock_it_gets() -> None:
    """Batches take 1 s to come; the first two, 5 s: only they are left out."""
    clock = FakeClock()
    clock.now = 1000.0  # a clock's zero means nothing

    class Slow:
        def __iter__(self):
            for index, batch in enumerate(batches(6)):
                clock.now += 5.0 if index < 2 else 1.0
                yield batch

    model, optimizer = model_and_optimizer()
    history = fit(model, Slow(), optimizer, warmup=2, clock=clock)
    assert history.samples_per_second == 16.0
    assert history.seconds == [14.0]


def test_synchronize_on_a_cpu_returns() -> None:
    synchronize(torch.device("cpu"))


# History


def history_of(epochs: int = 2, warmup: int = 1) -> History:
    model, optimizer = model_and_optimizer()
    return fit(model, batches(3), optimizer, epochs, warmup=warmup, clock=FakeClock(tick=0.25))


def test_history_shows_what_happened() -> None:
    history = history_of()
    lines = repr(history).splitlines()
    assert lines[0].split() == ["epoch", "loss", "accuracy", "seconds"]
    for epoch, line in enumerate(lines[1:3]):
        number, loss, accuracy, _ = line.split()
        assert int(number) == epoch + 1
        assert float(loss) == pytest.approx(history.losses[epoch], abs=1e-4)
        assert float(accuracy) == pytest.approx(history.accuracies[epoch], abs=1e-3)
    assert "samples/s" in lines[3] and lines[3].endswith("on cpu")
    assert lines[4].startswith("peak memory")
    assert "no step beyond" in repr(history_of(epochs=1, warmup=9))


def test_what_is_measured_can_be_sent_from_a_rank() -> None:
    model, optimizer = model_and_optimizer()
    history = fit(model, batches(5), optimizer)
    phases = time_phases(model, batches(5), optimizer)
    for result in (
        history,
        phases,
        history.scores[0],
        step_memory(model, *batches(1)[0], optimizer),
    ):
        assert repr(pickle.loads(pickle.dumps(result))) == repr(result)


def test_figures_have_labels_with_units_and_an_opaque_card() -> None:
    model, optimizer = model_and_optimizer()
    phases = time_phases(model, batches(5), optimizer)
    for figure in (history_of().figure(), phases.figure()):
        assert figure.get_facecolor()[3] == 1.0
        assert min(figure.get_facecolor()[:3]) > 0.9
        for axis in figure.axes:
            assert axis.get_xlabel() and axis.get_ylabel()
    assert "ms" in phases.figure().axes[0].get_xlabel()
    left, right = history_of().figure().axes
    assert "nats" in left.get_ylabel() and "%" in right.get_ylabel()


def test_figures_are_dark_on_light_under_a_dark_style_too() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    from matplotlib.colors import to_rgb
    from matplotlib.text import Text

    model, optimizer = model_and_optimizer()
    with plt.style.context("dark_background"):
        for figure in (history_of().figure(), time_phases(model, batches(5), optimizer).figure()):
            figure.savefig(io.BytesIO())
            texts = [text for text in figure.findobj(Text) if text.get_text()]
            assert len(texts) > 8
            assert all(max(to_rgb(text.get_color())) < 0.3 for text in texts)
            assert min(to_rgb(figure.get_facecolor())) > 0.9
    assert not plt.get_fignums(), "pyplot keeps none, so a cell shows a figure once"


def test_importing_the_module_does_not_import_matplotlib() -> None:
    code = "import sys, ddp_lab.single_device; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Memory


def test_step_memory_of_a_linear_model_is_counted_exactly() -> None:
    model = nn.Sequential(nn.Linear(64, 10)).double()
    numbers = 64 * 10 + 10
    images, labels = torch.rand(32, 64, dtype=torch.float64), torch.zeros(32, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory = step_memory(model, images, labels, optimizer, lambda outputs, _: outputs.mean())
    assert memory == StepMemory(8 * numbers, 8 * numbers, 8 * numbers, activations=32 * 64 * 8)
    assert memory.total == 3 * 8 * numbers + 32 * 64 * 8
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step_memory(model, images, labels, plain).optimizer_state == 0


def test_half_a_batch_halves_the_activations_alone() -> None:
    model, optimizer = model_and_optimizer("adam")
    images, labels = digits(dtype=torch.float64)[:64]
    whole = step_memory(model, images, labels, optimizer)
    half = step_memory(model, images[:32], labels[:32], optimizer)
    assert whole.activations / half.activations == pytest.approx(2, rel=0.001)
    assert (whole.parameters, whole.gradients) == (half.parameters, half.gradients)
    assert whole.parameters == 8 * 9930 and whole.optimizer_state == half.optimizer_state
    assert 2 * 8 * 9930 <= whole.optimizer_state < 2 * 8 * 9930 + 100, "Adam keeps two, and counts"


def test_step_memory_takes_one_training_step() -> None:
    (model, optimizer), (oracle, oracle_optimizer) = model_and_optimizer(), model_and_optimizer()
    step_memory(model, *batches(1)[0], optimizer)
    by_hand(oracle, oracle_optimizer, batches(1))
    torch.testing.assert_close(weights(model), weights(oracle), rtol=0, atol=1e-12)


def test_step_memory_prints_a_table() -> None:
    lines = repr(StepMemory(39_720, 39_720, 0, 1_200_000)).splitlines()
    assert [line.rsplit(maxsplit=2) for line in lines] == [
        ["parameters", "39.7", "kB"],
        ["gradients", "39.7", "kB"],
        ["optimizer state", "0", "bytes"],
        ["activations", "1.2", "MB"],
        ["total", "1.3", "MB"],
    ]
    assert len({len(line) for line in lines}) == 1, "the numbers stand in a column"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (2.5e6, "2.5 MB"), (3e13, "30.0 TB")],
)
def test_in_bytes(count: int, text: str) -> None:
    assert in_bytes(count) == text


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_peak_memory_grows_by_what_is_used_and_stays() -> None:
    """In a process of its own: in this one, other tests have set the peak already."""
    code = """if True:
        import torch
        from ddp_lab.single_device import peak_memory
        before = peak_memory()
        block = torch.ones(50_000_000)
        during = peak_memory()
        del block
        print(before, during, peak_memory())
    """
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    before, during, after = map(int, output.split())
    assert during - before == pytest.approx(200e6, rel=0.1)  # 50 million numbers of 4 bytes
    assert after == pytest.approx(during, rel=0.1)
    assert 50e6 < before < 5e9, "in bytes: Python with torch"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak of Linux processes")
def test_peak_memory_is_not_the_parents() -> None:
    """getrusage's would be: it outlives exec."""
    code = """if True:
        import subprocess, sys
        block = bytearray(b"x") * 1_200_000_000
        subprocess.run([sys.executable, "-c",
            "from ddp_lab.single_device import peak_memory; print(peak_memory())"])
    """
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert 50e6 < int(output) < 1.1e9


# Where the time goes


def test_phases_add_up_and_skip_the_warm_up() -> None:
    clock = FakeClock()
    phases = Phases(clock=clock)
    for data, forward in ((9.0, 9.0), (1.0, 2.0), (1.0, 4.0)):
        with phases("data"):
            clock.now += data
        with phases("forward"):
            clock.now += forward
        clock.now += 100  # between phases: nobody's
    phases.skip(1)
    assert phases.milliseconds == {"data": 1000.0, "forward": 3000.0}
    assert phases.shares == {"data": 0.25, "forward": 0.75}
    assert [line.split() for line in repr(phases).splitlines()] == [
        ["data", "1000.00", "ms", "25%"],
        ["forward", "3000.00", "ms", "75%"],
        ["whole", "step", "4000.00", "ms"],
    ]


def test_time_phases_trains_exactly_as_fit_does() -> None:
    (model, optimizer), (fitted, fit_optimizer) = model_and_optimizer(), model_and_optimizer()
    phases = time_phases(model.eval(), batches(6), optimizer, warmup=2)
    assert all(module.training for module in model.modules())
    fit(fitted, batches(6), fit_optimizer)
    assert torch.equal(weights(model), weights(fitted))
    assert list(phases.seconds) == ["data", "forward", "backward", "update"]
    assert {len(times) for times in phases.seconds.values()} == {4}


def test_each_phase_times_its_own_work() -> None:
    """Each part of the step advances the clock by another amount."""
    clock = FakeClock()

    class Loader(list):
        def __iter__(self):
            for batch in super().__iter__():
                clock.now += 1
                yield batch

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            clock.now += 2
            output = super().forward(x.flatten(1))
            output.register_hook(lambda gradient: setattr(clock, "now", clock.now + 4))
            return output

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            clock.now += 8
            return super().step(closure)

    model = Model(64, 10).double()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    phases = time_phases(model, Loader(batches(3)), optimizer, warmup=1, clock=clock)
    assert phases.milliseconds == {"data": 1e3, "forward": 2e3, "backward": 4e3, "update": 8e3}


def test_time_phases_needs_a_step_beyond_the_warm_up() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="2 steps, 2 of them warm-up"):
        time_phases(model, batches(2), optimizer, warmup=2)
