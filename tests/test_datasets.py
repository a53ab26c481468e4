"""Digits: one split for ever and everywhere, values as promised, nothing shared by accident."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from ddp_lab.datasets import Digits, digits, make_loader


@pytest.fixture(params=[True, False], ids=["train", "test"])
def part(request: pytest.FixtureRequest) -> Digits:
    return digits(request.param)


def fingerprints(images: torch.Tensor) -> list[bytes]:
    return [image.numpy().tobytes() for image in images]


def test_shapes_types_and_range(part: Digits) -> None:
    assert part.images.shape == (len(part), 1, 8, 8)
    assert part.images.dtype == torch.float32 and part.labels.dtype == torch.int64
    assert part.images.min() == 0 and part.images.max() == 1
    assert set(part.labels.tolist()) == set(range(10))


def test_train_and_test_are_disjoint_and_together_the_whole_set() -> None:
    train, test = digits(True), digits(False)
    assert (len(train), len(test)) == (1440, 357)
    source = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    both = fingerprints(train.images) + fingerprints(test.images)
    assert sorted(both) == sorted(fingerprints(source))
    assert len(set(both)) == len(both), "no image occurs twice, so the parts are disjoint"


def test_images_keep_their_labels() -> None:
    data = load_digits()
    source = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    label_of = dict(zip(fingerprints(source), data.target.tolist(), strict=True))
    for part in (digits(True), digits(False)):
        assert [label_of[key] for key in fingerprints(part.images)] == part.labels.tolist()


def test_the_split_never_changes() -> None:
    labels = torch.cat([digits(True).labels, digits(False).labels])
    assert hashlib.sha256(labels.numpy().tobytes()).hexdigest()[:16] == "cef12ef94d84a613"


def test_the_split_does_not_depend_on_or_disturb_seeds() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = digits(True).images
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(digits(True).images, first)


def test_each_class_is_in_both_parts_in_proportion() -> None:
    train, test = digits(True).labels.bincount(), digits(False).labels.bincount()
    share = test / (train + test)  # (10,); 357 of 1,797 are 0.20
    assert share.min() > 0.12 and share.max() < 0.28


def test_float64_holds_the_same_values() -> None:
    exact = digits(dtype=torch.float64).images
    assert exact.dtype == torch.float64
    assert torch.equal(exact, digits().images.double()), "sixteenths are exact in float32"
    assert torch.equal(exact * 16, (exact * 16).round())


def test_each_call_gives_tensors_of_its_own() -> None:
    first = digits()
    first.images.zero_()
    first.labels.zero_()
    again = digits()
    assert again.images.max() == 1 and again.labels.max() == 9


def test_upscaled_with_three_channels() -> None:
    large = digits(False, size=32, channels=3)
    assert large.images.shape == (357, 3, 32, 32)
    assert torch.equal(large.images[:, 0], large.images[:, 1])
    assert torch.equal(large.images[:, 0], large.images[:, 2])
    assert large.images.min() >= 0 and large.images.max() <= 1
    small_means = digits(False).images.mean(dim=(1, 2, 3))
    correlation = torch.corrcoef(torch.stack([small_means, large.images.mean(dim=(1, 2, 3))]))
    assert correlation[0, 1] > 0.99, "an image stays the same image"


def test_normalized_by_the_training_pixels() -> None:
    train = digits(True, normalize=True, dtype=torch.float64).images
    test = digits(False, normalize=True, dtype=torch.float64).images
    assert abs(train.mean()) < 1e-12 and abs(train.std(correction=0) - 1) < 1e-12
    raw = digits(True, dtype=torch.float64).images
    expected = (digits(False, dtype=torch.float64).images - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(test, expected, rtol=0, atol=1e-12)


def test_slicing_gives_images_and_labels() -> None:
    data = digits()
    images, labels = data[3:7]
    assert torch.equal(images, data.images[3:7]) and torch.equal(labels, data.labels[3:7])


def test_repr_says_what_it_is() -> None:
    assert repr(digits()) == "digits, train: 1,440 images of 1x8x8, float32"
    large = digits(False, size=32, channels=3, dtype=torch.float64)
    assert repr(large) == "digits, test: 357 images of 3x32x32, float64"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 4}, "size must be at least 8"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"dtype": torch.int64}, "floating-point type such as torch.float32"),
    ],
)
def test_bad_arguments_say_what_is_wanted(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digits(**arguments)


def test_a_name_is_not_taken_for_true() -> None:
    with pytest.raises(TypeError, match="train must be True or False, not 'test'"):
        digits("test")


def test_importing_the_module_does_not_import_scikit_learn() -> None:
    code = "import sys, ddp_lab.datasets; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The loader


def order(loader: torch.utils.data.DataLoader) -> list[int]:
    return [int(i) for (rows,) in loader for i in rows]


@pytest.fixture
def rows() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.arange(10))


def test_without_a_seed_the_order_is_the_datasets(rows: torch.utils.data.TensorDataset) -> None:
    loader = make_loader(rows, 4)
    assert order(loader) == order(loader) == list(range(10))
    assert [len(batch) for (batch,) in loader] == [4, 4, 2], "the last batch is kept"


def test_a_seed_fixes_the_order_and_each_epoch_has_another(
    rows: torch.utils.data.TensorDataset,
) -> None:
    loader, again, other = (make_loader(rows, 4, seed=seed) for seed in (0, 0, 1))
    first, second = order(loader), order(loader)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert [order(again), order(again)] == [first, second]
    assert order(other) != first


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_the_loader_and_the_global_generator_leave_each_other_alone(
    rows: torch.utils.data.TensorDataset, seed: int | None
) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = order(make_loader(rows, 4, seed=seed))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert order(make_loader(rows, 4, seed=seed)) == first


def test_drop_last(rows: torch.utils.data.TensorDataset) -> None:
    assert [len(batch) for (batch,) in make_loader(rows, 4, drop_last=True)] == [4, 4]


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_size_below_one(rows: torch.utils.data.TensorDataset, batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, not {batch_size}"):
        make_loader(rows, batch_size)
