"""Does the harness that runs users' scripts tell right rewrites from wrong ones?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import check
from samples.sums import Sums, scripted
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from verifying import start, start_several

from migrate.runner import order
from migrate.verify.trace import Run

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
without_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is really here")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(SAMPLES / "dp.py", [], tmp_path_factory.mktemp("original"))


def changed(name: str, old: str, new: str, folder: Path) -> Path:
    """A copy of the sample, with one of its lines changed."""
    text = (SAMPLES / name).read_text()
    assert text.count(old) == 1
    script = folder / "changed.py"
    script.write_text(text.replace(old, new))
    return script


def distance(first: Run, second: Run) -> float:
    """Largest difference of a weight or a buffer."""
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    one, two = (torch.load(run.cwd / "weights.pt") for run in (first, second))
    assert list(one) == list(two)
    return max(float((one[name].double() - two[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("rewritten", ["ddp.py", "fsdp2.py"])
def test_right_rewrites_end_with_the_original_weights(
    original: Run, rewritten: str, tmp_path: Path
) -> None:
    run = start_several(SAMPLES / rewritten, [], tmp_path)
    assert distance(original, run) < 1e-5
    assert [len(rank.steps) for rank in run.ranks.values()] == [12, 12]
    assert (run.ranks[0].written, run.ranks[1].written) == ({"weights.pt"}, set())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sampler.set_epoch(epoch)", "pass"),
        ("8 // dist.get_world_size()", "8"),
        ("net = nn.SyncBatchNorm.convert_sync_batchnorm(net)", "pass"),
    ],
)
def test_wrong_rewrites_end_with_other_weights(
    original: Run, old: str, new: str, tmp_path: Path
) -> None:
    run = start_several(changed("ddp.py", old, new, tmp_path), [], tmp_path)
    assert distance(original, run) > 1e-3


def test_a_file_that_two_ranks_write_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "careless.py"
    script.write_text(
        "import os, sys, torch\n"
        "torch.save([1], 'both.pt')\n"
        "open(f'own{os.environ[\"RANK\"]}.txt', 'w').write(' '.join(sys.argv[1:]))\n"
    )
    run = start_several(script, ["--epochs", "2"], tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.written_by_several() == {"both.pt"}
    assert run.ranks[1].written == {"both.pt", "own1.txt"}
    assert (tmp_path / "own1.txt").read_text() == "--epochs 2"


def test_ranks_that_wait_for_each_other_are_ended(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import torch.distributed as dist, time\n"
        "dist.init_process_group('nccl')\n"
        "dist.barrier() if dist.get_rank() == 0 else time.sleep(600)\n"
    )
    run = start_several(script, [], tmp_path, stall_s=4)
    assert run.ended == "stall"
    assert run.returncode != 0
    assert [rank.status for rank in run.ranks.values()] == ["running", "running"]
    pids = [str(rank.pid) for rank in run.ranks.values()]
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []


def test_an_exception_is_recorded_and_ends_the_process(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("open('log.txt', 'a')\nraise ValueError('no data')\n")
    run = start(script, [], tmp_path, sees=1)
    assert run.returncode == 1
    assert run.ranks[0].error == "ValueError: no data"
    assert run.ranks[0].written == {"log.txt"}
    assert "raises.py" in run.stderr


@without_gpus
def test_devices_named_in_every_way_mean_the_cpu() -> None:
    def body() -> None:
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0], device=torch.device("cuda", 1)),
            torch.ones(2).to(0),
            torch.ones(2).to("cuda", torch.float64, non_blocking=True),
            torch.ones(2).new_zeros(3, device="cuda:1"),
            torch.cuda.FloatTensor([1.0]),
            torch.ones(2).type("torch.cuda.LongTensor"),
            torch.empty(2, pin_memory=True).pin_memory().cuda(non_blocking=True),
            nn.Linear(2, 2, device="cuda").weight,
            nn.Linear(2, 2).to(torch.device("cuda")).cuda(1).weight,
        ]
        assert all(tensor.is_cuda for tensor in made)
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert str(torch.device("cuda:1")) == "cuda:1"

    check(body)


@without_gpus
def test_a_device_that_is_not_there_is_refused() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(2, device="cuda:2")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(2)

    check(body)


@without_gpus
def test_a_default_device_lands_on_the_cpu() -> None:
    def body() -> None:
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        torch.set_default_device("cuda")
        assert torch.ones(2).device.type == "cpu"
        with torch.device("meta"):
            assert torch.ones(2).device.type == "meta"
        with torch.device("cuda:1"):
            assert torch.ones(2).device.type == "cpu"

    check(body)


@without_gpus
def test_a_copy_on_the_cpu_does_not_follow_training() -> None:
    def body() -> None:
        weight = nn.Parameter(torch.zeros(2, device="cuda"))
        kept = [weight.detach().cpu(), weight.data.to("cpu"), weight.cpu()]
        with torch.no_grad():
            weight += 1
        assert [tensor.sum().item() for tensor in kept] == [0, 0, 0]

    check(body)


@without_gpus
def test_checkpoints_load_with_every_map_location(tmp_path: Path) -> None:
    def body() -> None:
        torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
        places = ["cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, None]
        for place in [*places, lambda storage, location: storage.cuda(1)]:
            assert torch.load(tmp_path / "a.pt", map_location=place)["w"].sum() == 2

    check(body)


@without_gpus
def test_mixed_precision_computes_in_fp32_and_keeps_its_interface() -> None:
    def body() -> None:
        model = nn.Linear(2, 2).cuda()
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda", dtype=torch.float16), torch.amp.autocast("cuda"):
            loss = model(torch.ones(1, 2).cuda()).sum()
        assert loss.dtype == torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scaler.state_dict()["scale"] == 65536
        assert torch.equal(model.weight, before - 1)

    check(body)


@without_gpus
def test_the_rest_of_cuda_answers() -> None:
    def body() -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(1):
            start.record()
            assert torch.cuda.current_device() == 1
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0
        assert torch.cuda.current_device() == 0
        torch.cuda.manual_seed_all(3)
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        assert len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count() == 2
        assert isinstance(torch.Generator("cuda").manual_seed(1), torch.Generator)
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.get_device_properties(0).total_memory > 0
        torch.backends.cudnn.benchmark = True

    check(body)


@without_gpus
def test_devices_work_in_workers_threads_backward_and_scripted_functions() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * torch.full((2,), 2.0, device="cuda")

    def collate(rows: list[tuple[Tensor]]) -> Tensor:
        return torch.stack([row for (row,) in rows]).cuda() + torch.ones(1, device="cuda")

    def body() -> None:
        x = torch.zeros(2, requires_grad=True)
        Doubled.apply(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2]
        data = TensorDataset(torch.zeros(2, 1))
        loader = DataLoader(data, num_workers=1, collate_fn=collate, pin_memory=True)
        assert [batch.item() for batch in loader] == [1, 1]
        assert torch.jit.script(scripted)(torch.ones(2)).tolist() == [1, 1]
        assert next(iter(torch.compile(nn.Linear(1, 1)).state_dict())) == "_orig_mod.weight"

    check(body)


@without_gpus
def test_replicas_see_chunks_and_the_first_keeps_its_buffers() -> None:
    def body() -> None:
        model, x = Sums(), torch.arange(10.0).view(5, 2)
        wrapped = nn.DataParallel(model)
        out = wrapped(x, {"scale": 2.0})
        assert out["total"].tolist() == [15, 30]  # rows 0-2 and 3-4
        assert torch.equal(out["pair"].total, out["total"])
        assert out["list"][0].shape == out["pair"].rows.shape == (5, 2)
        assert out["none"] is None
        torch.testing.assert_close(model.norm.running_mean, 0.1 * x[:3].mean(0))
        assert (model.calls, int(model.norm.num_batches_tracked)) == (0, 1)
        assert next(iter(wrapped.state_dict())) == "module.norm.weight"
        out["pair"].rows.square().sum().backward()
        assert model.norm.weight.grad is not None

    check(body)


@without_gpus
def test_replicas_are_as_many_as_there_are_chunks() -> None:
    def body() -> None:
        model = nn.DataParallel(Sums().eval(), device_ids=[0, 1, 2, 3])
        assert model(torch.ones(6, 2), {"scale": 1.0})["total"].tolist() == [4, 4, 4]
        total = nn.parallel.data_parallel(Sums(), (torch.ones(6, 2), {"scale": 1.0}), [0, 1])
        assert total["total"].tolist() == [6, 6]

    check(body, devices=4)


@without_gpus
def test_the_whole_batch_still_gives_a_vector_for_a_scalar() -> None:
    def body() -> None:
        model, x = Sums(), torch.arange(10.0).view(5, 2)
        out = nn.DataParallel(model)(x, {"scale": 2.0})
        assert out["total"].tolist() == [45]
        torch.testing.assert_close(model.norm.running_mean, 0.1 * x.mean(0))

    check(body, mode="whole")


@without_gpus
@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronised_batch_norm_equals_batch_norm_of_the_whole_batch(
    momentum: float | None,
) -> None:
    def body() -> None:
        torch.manual_seed(5)
        plain = nn.BatchNorm2d(3, momentum=momentum)
        synced = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3, momentum=momentum))
        mine = slice(0, 1) if dist.get_rank() == 0 else slice(1, 4)
        for _ in range(2):
            whole = torch.randn(4, 3, 5, 5).mul(3).add(7).requires_grad_()
            factor, part = torch.randn(4, 3, 5, 5), whole.detach()[mine].requires_grad_()
            expected, found = plain(whole), synced(part)
            expected.mul(factor).sum().backward()
            found.mul(factor[mine]).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(found, expected[mine], atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(part.grad, whole.grad[mine], atol=1e-6, rtol=1e-6)
        for one, other in zip(synced.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(one.grad)
            torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-6)
        for one, other in zip(synced.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(synced.eval()(factor), plain.eval()(factor))

    check(body, ranks=2)


@without_gpus
def test_synchronised_batch_norm_alone_equals_batch_norm() -> None:
    def body() -> None:
        x, synced, plain = torch.randn(4, 3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3)
        assert torch.equal(synced(x), plain(x))
        assert torch.equal(synced.running_var, plain.running_var)

    check(body)


@without_gpus
def test_nccl_is_gloo_and_ddp_takes_devices() -> None:
    def body() -> None:
        rank = dist.get_rank()
        model = DistributedDataParallel(
            nn.Linear(1, 1).cuda(rank), device_ids=[rank], output_device=rank
        )
        mean = torch.full((1,), float(rank), device="cuda")
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        dist.barrier(device_ids=[rank])
        assert (mean.item(), model.device_type, dist.get_backend()) == (0.5, "cpu", "gloo")
        assert dist.get_world_size(dist.new_group([0, 1], backend="nccl")) == 2

    check(body, ranks=2)


@without_gpus
def test_a_random_and_a_distributed_sampler_walk_through_the_same_orders() -> None:
    def body() -> None:
        order.install()
        data = list(range(6))
        first = RandomSampler(data)
        ranks = [DistributedSampler(data, 2, rank) for rank in (0, 1)]
        for epoch in (3, 4):  # a resumed run starts late, and still with order 0
            seen = list(first)
            for sampler in ranks:
                sampler.set_epoch(epoch)
            assert seen == list(woven(ranks))
            assert list(woven(ranks)) == seen
        assert seen == order.permutation(6, 1) != order.permutation(6, 0)

    check(body)


@without_gpus
def test_steered_samplers_pad_drop_and_draw_as_real_ones() -> None:
    def real(sampler: Any) -> tuple[int, int]:
        torch.manual_seed(0)
        return len(list(sampler)), int(torch.randint(10**9, ()))

    def body() -> None:
        data, generator = list(range(7)), torch.Generator()
        weighted = WeightedRandomSampler([1.0] * 7, 7)
        sampler = RandomSampler(data)
        before = (real(sampler), real(weighted), list(RandomSampler(data, generator=generator)))
        state = generator.get_state()
        generator = torch.Generator()
        order.install()
        after = (real(sampler), real(weighted), list(RandomSampler(data, generator=generator)))
        assert (before[:2], state.tolist()) == (after[:2], generator.get_state().tolist())
        padded = [DistributedSampler(data, 2, rank) for rank in (0, 1)]
        assert [real(sampler) for sampler in padded] == [(4, before[0][1])] * 2
        dropped = DistributedSampler(data, 2, 0, drop_last=True, shuffle=False)
        assert list(dropped) == [0, 2, 4]

    check(body)


def woven(samplers: list[DistributedSampler[int]]) -> Iterator[int]:
    """The samples of all ranks, in the order of the global batches."""
    for together in zip(*samplers, strict=True):
        yield from together
