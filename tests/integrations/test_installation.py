"""Versions get into engines, in place and by their loaders; what cannot be is refused before."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from kit import inside, until
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import OLD, weights_of

import torch_ros
from torch_ros.errors import (
    DeadlineExceeded,
    Fenced,
    ManifestMismatch,
    TorchRosError,
    UsageError,
    VersionNotFound,
)
from torch_ros.integrations import installation, landing_plan
from torch_ros.integrations.installation import Installer, InstallOptions
from torch_ros.integrations.landing_plan import Obstacle, has_nan, state_of
from torch_ros.integrations.recording import record
from torch_ros.integrations.tries import IN_A_ROW

NAMES = iter(range(10_000))
EVERYWHERE = ("qk.weight", "out.weight", "norm.weight")


class Fused(nn.Module):
    """An engine: q and k in one parameter, k of other ranks left out; `out` whole; a norm."""

    def __init__(self, rank=0, ranks=1):
        super().__init__()
        self.rank, self.rows = rank, 2 // ranks
        for name, shape in (("qk", (4 + self.rows, 4)), ("out", (4, 4)), ("norm", (4,))):
            part = nn.Module()
            part.weight = nn.Parameter(torch.full(shape, OLD), requires_grad=False)
            self.add_module(name, part)
        self.raises = None

    def load_weights(self, weights):
        for fqn, weight in weights:
            if fqn == self.raises and not weight.is_meta:
                raise RuntimeError("the loader gives up")
            if fqn == "k":
                mine = weight.narrow(0, self.rank * self.rows, self.rows)
                self.qk.weight.data[4:].copy_(mine)
            else:
                target = self.qk.weight.data[:4] if fqn == "q" else self.get_submodule(fqn).weight
                target.copy_(weight)

    def has(self, version):
        k = version["k"].narrow(0, self.rank * self.rows, self.rows)
        qk = torch.cat([version["q"], k])
        both = [(self.qk, qk), (self.out, version["out"]), (self.norm, version["norm"])]
        return all(torch.equal(part.weight, expected) for part, expected in both)


class Toy:
    """The one file that knows such engines."""

    def __init__(self, module, obstacles=(), elsewhere=()):
        self.module, self.stands_in_the_way = module, dict(obstacles)
        self.elsewhere = elsewhere
        self.loads = []
        self.looked = lambda: None

    def state(self):
        return state_of(self.module)

    def record(self, contents):
        return record(self.module, contents)

    def obstacles(self, recording):
        self.looked()
        return dict(self.stands_in_the_way)

    def may_lack(self, fqn):
        return fqn in self.elsewhere

    def load(self, modules, weights):
        self.loads.append((set(modules), []))

        def noted():
            for fqn, weight in weights:
                self.loads[-1][1].append(fqn)
                yield fqn, weight

        self.module.load_weights(noted())


class Together:
    """Ranks that are threads."""

    def __init__(self, ranks):
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._said = [None] * ranks
        self._rank = threading.local()

    def of(self, rank):
        peers = self

        class Peer:
            def gather(self, mine):
                peers._said[rank] = mine
                peers._barrier.wait()
                said = list(peers._said)
                peers._barrier.wait()
                return said

        return Peer()


@pytest.fixture
def place():
    return {"endpoint": f"memory://installation-{next(NAMES)}"}


@pytest.fixture
def opened(place):
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            torch_ros.open("m", **(place | {"linger_s": 0} | options))
        )


class Publisher:
    def __init__(self, handle):
        self.handle = handle

    def publish(self, version, **changes):
        tensors = weights_of(q=(4, 4), k=(2, 4), out=(4, 4), norm=(4,)) | changes
        tensors = {fqn: one for fqn, one in tensors.items() if one is not None}
        self.handle.unpublish()
        self.handle.unregister()
        self.handle.register(tensors)
        self.handle.publish(version)
        return tensors


@pytest.fixture
def trainer(opened):
    return Publisher(opened())


def installer_of(handle, module, obstacles=(), *, tells=False, **options):
    teller = handle if tells else None
    return Installer(handle, Toy(module, obstacles), InstallOptions(**options), teller=teller)


# -- one process


def test_all_is_read_in_place_and_offered_under_the_names_of_the_checkpoint(opened, trainer):
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine)
    for version in (1, 2):
        published = trainer.publish(version)
        report = installer.install("latest", 20)
        assert engine.has(published)
        assert (report.version, report.direct_share) == (version, 1)
        assert report.direct_bytes == 4 * 44
        assert installer.active == follower.version == version
    trainer.handle.unpublish()
    reader = opened()
    got = {fqn: torch.zeros_like(one) for fqn, one in published.items()}
    reader.register(got)
    assert reader.replicate(2, timeout_s=20) == 2
    assert all(torch.equal(got[fqn], one) for fqn, one in published.items())


def test_without_relay_nothing_is_offered(opened, trainer):
    follower = opened()
    trainer.publish(1)
    installer_of(follower, Fused(), relay=False).install(1, 20)
    assert follower.version is None


def test_an_engine_that_has_a_part_of_a_tensor_is_no_source(opened, trainer):
    """As one of several that share their experts, beside data parallelism."""
    engine, follower = Fused(0, 2), opened()
    toy = Toy(engine, elsewhere=["k"])
    installer = Installer(follower, toy, InstallOptions())
    for version in (1, 2):
        published = trainer.publish(version)
        report = installer.install(version, 20)
        assert engine.has(published)
        assert list(report.direct) == ["k", "norm", "out", "q"]
        assert (installer.active, follower.version) == (version, None)


def test_a_module_with_an_obstacle_goes_through_the_loader_in_buffers(opened, trainer):
    engine, follower = Fused(), opened()
    obstacles = {"qk.weight": Obstacle("packed")}
    installer = installer_of(follower, engine, obstacles, buffer_bytes=64)
    published = trainer.publish(1)
    report = installer.install(1, 20)
    assert engine.has(published)
    assert report.staged == {"k": "packed", "q": "packed"}
    assert report.staged_bytes == 4 * 24
    assert sorted(report.direct) == ["norm", "out"]
    assert follower.version is None  # a part of a version is no source
    assert "staged, packed: " in str(report)


def test_never_loads_everything(opened, trainer):
    engine = Fused()
    published = trainer.publish(1)
    report = installer_of(opened(), engine, direct="never").install(1, 20)
    assert engine.has(published)
    assert not report.direct


def test_a_proof_brings_parameters_in_place_from_the_next_version_on(opened, trainer):
    engine, follower = Fused(), opened()
    obstacles = {name: Obstacle("unknown", is_provable=True) for name in state_of(engine)}
    installer = installer_of(follower, engine, obstacles)
    for version, share in ((1, 0), (2, 1)):
        published = trainer.publish(version)
        assert installer.install(version, 20).direct_share == share
        assert engine.has(published)


def test_a_parameter_that_the_engine_keeps_otherwise_stays_with_the_loader(opened, trainer):
    class Swapping(Fused):
        def load_weights(self, weights):
            for fqn, weight in weights:
                super().load_weights([(fqn, weight)])
                if fqn == "out" and not weight.is_meta:
                    self.out.weight.data.copy_(weight.flip(0))

    engine = Swapping()
    obstacles = {name: Obstacle("unknown", is_provable=True) for name in state_of(engine)}
    installer = installer_of(opened(), engine, obstacles)
    for version in (1, 2, 3):
        published = trainer.publish(version)
        report = installer.install(version, 20)
        assert torch.equal(engine.out.weight, published["out"].flip(0))
    assert list(report.staged) == ["out"]
    assert "does not have it" in report.staged["out"]


def test_a_proof_counts_for_all_names_of_a_parameter(opened, trainer):
    """As of a router's bias, which the experts have, too."""
    engine = Fused()
    engine.experts = nn.Module()
    engine.experts.weight, engine.experts.bias = engine.out.weight, engine.norm.weight
    names = ("out.weight", "norm.weight", "experts.weight", "experts.bias")
    obstacles = dict.fromkeys(names, Obstacle("unknown", is_provable=True))
    follower = opened()
    installer = installer_of(follower, engine, obstacles)
    for version in (1, 2):
        published = trainer.publish(version, norm=torch.arange(4.0))
        report = installer.install(version, 20)
        assert engine.has(published)
        assert sorted(report.staged) == (["norm", "out"] if version == 1 else [])
    assert follower.version == 2


def test_equal_elements_wait_for_a_version_that_proves_something(opened, trainer):
    engine = Fused()
    obstacles = {"norm.weight": Obstacle("unknown", is_provable=True)}
    installer = installer_of(opened(), engine, obstacles)
    for version, norm in enumerate([torch.ones(4), torch.arange(4.0), torch.ones(4)], start=1):
        trainer.publish(version, norm=norm)
        assert bool(installer.install(version, 20).staged) == (version < 3)
        assert torch.equal(engine.norm.weight, norm)


def test_another_set_of_tensors_is_recorded_anew(opened, trainer):
    engine = Fused()
    installer = installer_of(opened(), engine, ignore=["extra"])
    trainer.publish(1)
    installer.install(1, 20)
    published = trainer.publish(2, extra=torch.ones(2))
    report = installer.install(2, 20)
    assert engine.has(published)
    assert list(report.ignored) == ["extra"]


def test_the_next_version_finds_all_prepared_and_asks_once_what_it_contains(
    opened, trainer, monkeypatch
):
    asked, contents = [], torch_ros.ShardHandle.contents

    def counted(handle, *args, **options):
        asked.append(args)
        return contents(handle, *args, **options)

    monkeypatch.setattr(torch_ros.ShardHandle, "contents", counted)
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine, relay=False)
    known = []
    for version in (1, 2):
        published = trainer.publish(version)
        installer.install(version, 20)
        assert engine.has(published)
        known.append(inside(follower).tensors.registered)
    assert known[0] is known[1]
    assert asked == [(1,), (2,)]


@pytest.mark.parametrize("way", ["other memory", "another parameter", "other strides"])
def test_parameters_that_have_moved_are_read_into_where_they_are_now(opened, trainer, way):
    engine = Fused()
    installer = installer_of(opened(), engine, relay=False)
    trainer.publish(1)
    installer.install(1, 20)
    out, before = engine.out, engine.out.weight.data.clone()
    if way == "other memory":
        out.weight.data = before
    elif way == "another parameter":
        out.weight = nn.Parameter(before, requires_grad=False)
    else:  # where it was
        out.weight.data = out.weight.data.t()
    published = trainer.publish(2)
    assert installer.install(2, 20).direct_share == 1
    assert engine.has(published)


@pytest.mark.parametrize("version", [1, "latest"])
def test_a_version_that_the_engine_has_and_offers_is_not_read_again(opened, trainer, version):
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine)
    published = trainer.publish(1)
    report = installer.install(1, 20)
    trainer.handle.unpublish()
    assert installer.install(version, 20) is report
    assert engine.has(published)
    assert installer.active == follower.version == 1


def test_a_version_of_another_run_is_another_version(opened, trainer):
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine)
    trainer.publish(1)
    installer.install(1, 20)
    published = Publisher(opened(run="new")).publish(1)
    installer.install("latest", 20)
    assert engine.has(published)


# -- a draft


class Mtp(nn.Module):
    """A draft: one tensor of its own, and the norm that is its target's."""

    def __init__(self):
        super().__init__()
        self.mtp = nn.Module()
        self.mtp.weight = nn.Parameter(torch.full((4,), OLD), requires_grad=False)

    def load_weights(self, weights):
        for fqn, weight in weights:
            if fqn == "mtp":
                self.mtp.weight.data.copy_(weight)


class Drafting(Toy):
    def may_lack(self, fqn):
        return True


@pytest.fixture
def drafting(opened):
    """An engine, its draft and the installer of both, which tells what it installs."""
    engine, draft, handle = Fused(), Mtp(), opened(replica="engine", installs=True)
    toy = Toy(engine, elsewhere=["mtp"])

    def follow(reader, model):
        options = InstallOptions(relay=False, on_failure="refuse")
        made.drafts = Installer(reader, model, options)
        how = InstallOptions(on_failure="keep")
        made.installer = Installer(handle, toy, how, teller=handle, draft=made.drafts)

    made = SimpleNamespace(engine=engine, draft=draft, toy=toy, follow=follow)
    follow(opened(spot=True), Drafting(draft))
    return made


def test_a_draft_has_each_version_before_the_engine(drafting, trainer):
    for version in (1, 2):
        published = trainer.publish(version, mtp=torch.full((4,), float(version)))
        had = []
        drafting.toy.looked = lambda had=had: had.append(drafting.draft.mtp.weight[0].item())
        drafting.installer.install("latest", 20)
        assert drafting.engine.has(published)
        assert torch.equal(drafting.draft.mtp.weight, published["mtp"])
        assert had == [OLD if version == 1 else 1.0]  # the engine has looked whether it fits


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"mtp": None}, "nothing for mtp.weight"),
        ({"mtp": torch.full((4,), torch.nan)}, "a NaN"),
        ({"mtp": torch.full((4,), 2.0), "norm": None}, "nothing for norm.weight"),
    ],
)
def test_a_version_that_fits_one_of_both_changes_neither(drafting, trainer, changes, found):
    first = trainer.publish(1, mtp=torch.ones(4))
    drafting.installer.install(1, 20)
    trainer.publish(2, **{"mtp": torch.ones(4)} | changes)
    with pytest.raises(ManifestMismatch, match=found):
        drafting.installer.install(2, 20)
    assert drafting.engine.has(first)
    assert torch.equal(drafting.draft.mtp.weight, first["mtp"])
    assert drafting.installer.active == 1
    assert trainer.handle.installs()["engine"].active.version == 1


def test_a_draft_of_a_model_of_its_own_goes_to_the_latest_of_that(drafting, trainer, place):
    named = place | {"linger_s": 0}
    with torch_ros.open("heads", **named) as heads, torch_ros.open("heads", **named) as reader:
        drafting.follow(reader, Toy(drafting.draft))
        for version, head in [(1, 7), (2, 8), (3, 8)]:
            if head != drafting.drafts.active:
                heads.publish_copy(head, {"mtp": torch.full((4,), float(head))})
            published = trainer.publish(version)
            drafting.installer.install(version, 20)
            assert drafting.engine.has(published)
            assert drafting.draft.mtp.weight.tolist() == [head] * 4


def test_a_failure_of_the_draft_is_none_of_the_engines_version(drafting, trainer, place):
    """Which would be refused for a while, whatever becomes of the draft."""
    named = place | {"linger_s": 0}
    with torch_ros.open("heads", **named) as heads, torch_ros.open("heads", **named) as reader:
        drafting.follow(reader, Toy(drafting.draft))
        published = trainer.publish(1)
        heads.publish_copy(7, {"mtp": torch.full((4,), torch.nan)})
        for _ in range(IN_A_ROW):
            with pytest.raises(ManifestMismatch, match="a NaN"):
                drafting.installer.install(1, 20)
        assert drafting.draft.mtp.weight.tolist() == [OLD] * 4
        heads.publish_copy(8, {"mtp": torch.full((4,), 8.0)})
        drafting.installer.install(1, 20)
        assert drafting.engine.has(published)
        assert drafting.draft.mtp.weight.tolist() == [8.0] * 4
        trainer.publish(2, norm=torch.full((4,), torch.nan))
        for _ in range(IN_A_ROW):
            with pytest.raises(ManifestMismatch, match="a NaN"):
                drafting.installer.install(2, 20)
        assert drafting.installer._tries.failures == IN_A_ROW


def test_an_engine_that_goes_back_takes_its_draft_along(drafting, trainer):
    first = trainer.publish(1, mtp=torch.ones(4))
    drafting.installer.install(1, 20)
    trainer.publish(2, mtp=torch.full((4,), 2.0), out=torch.full((4, 4), torch.nan))
    with pytest.raises(ManifestMismatch, match="a NaN"):
        drafting.installer.install(2, 20)
    assert drafting.engine.has(first)
    assert torch.equal(drafting.draft.mtp.weight, first["mtp"])
    assert (drafting.installer.active, drafting.drafts.active) == (1, 1)


def test_a_draft_that_cannot_go_back_is_told_of(drafting, trainer, monkeypatch, caplog):
    first = trainer.publish(1, mtp=torch.ones(4))
    drafting.installer.install(1, 20)

    def fail(kept):
        raise RuntimeError("no memory")

    monkeypatch.setattr(drafting.drafts, "_put_back", fail)
    trainer.publish(2, mtp=torch.full((4,), 2.0), out=torch.full((4, 4), torch.nan))
    with pytest.raises(ManifestMismatch, match="a NaN"):
        drafting.installer.install(2, 20)
    assert drafting.engine.has(first)
    assert "its draft has another version" in caplog.text


# -- refused, before anything is written


@pytest.mark.parametrize("obstacles", [{}, dict.fromkeys(EVERYWHERE, Obstacle("packed"))])
def test_a_version_that_goes_before_the_first_byte_leaves_what_was_there(
    opened, trainer, obstacles
):
    """As when the trainer steps on while the engine still looks where to put it."""
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine, obstacles)
    first = trainer.publish(1)
    installer.install(1, 20)
    offered = follower.version
    trainer.publish(2)
    installer._engine.looked = trainer.handle.unpublish
    with pytest.raises(VersionNotFound):
        installer.install(2, 5)
    assert engine.has(first)
    assert installer.active == 1
    assert follower.version == offered


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"norm": None}, "nothing for norm.weight \\(4 elements\\)"),
        ({"q": None, "k": None}, "nothing for qk.weight \\(24 elements\\)"),
        ({"out": torch.ones(5, 4)}, "nothing for out.weight .16 elements.; out: the loader raised"),
    ],
)
def test_a_version_that_lacks_something_is_refused(opened, trainer, changes, found):
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine)
    first = trainer.publish(1)
    installer.install(1, 20)
    trainer.publish(2, **changes)
    with pytest.raises(ManifestMismatch, match=found):
        installer.install(2, 20)
    assert engine.has(first)
    assert installer.active == follower.version == 1  # it is offered still


def test_another_dtype_is_cast_with_a_warning_or_refused(opened, trainer, caplog):
    engine, follower = Fused(), opened()
    published = trainer.publish(1, out=torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ManifestMismatch, match=r"out, cast from torch.bfloat16 to torch.float32"):
        installer_of(follower, engine, cast=False).install(1, 20)
    assert not torch.equal(engine.norm.weight, published["norm"])
    report = installer_of(follower, engine).install(1, 20)
    assert list(report.staged) == ["out"]
    assert engine.has(published | {"out": torch.ones(4, 4)})
    assert "the engine casts out" in caplog.text


def test_a_dtype_that_must_not_be_cast_leaves_what_was_there(opened, trainer):
    engine, follower = Fused(), opened()
    installer = installer_of(follower, engine, cast=False)
    first = trainer.publish(1)
    installer.install(1, 20)
    trainer.publish(2, out=torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ManifestMismatch, match="out, cast from torch.bfloat16"):
        installer.install(2, 20)
    assert engine.has(first)
    assert installer.active == follower.version == 1


@pytest.mark.parametrize("obstacles", [{}, dict.fromkeys(EVERYWHERE, Obstacle("packed"))])
def test_a_number_that_goes_back_is_refused(opened, trainer, obstacles):
    engine, follower, keeper = Fused(), opened(installs=True), opened()
    installer = installer_of(follower, engine, obstacles, tells=True)
    first = trainer.publish(1)
    installer.install(1, 20)
    keeper.register({fqn: torch.zeros_like(one) for fqn, one in first.items()})
    keeper.replicate(1)
    second = trainer.publish(2)
    installer.install(2, 20)
    with pytest.raises(UsageError, match="version 1 is not installed.*only grow within a run"):
        installer.install(1, 20)
    assert engine.has(second)
    assert installer.active == keeper.installs()[follower.replica].active.version == 2
    third = trainer.publish(3)
    installer.install("latest", 20)
    assert engine.has(third)


@pytest.mark.parametrize("when", ["before", "while it looks"])
def test_an_engine_whose_name_another_one_takes_keeps_its_version(opened, trainer, when):
    engine, other = Fused(), Fused()
    options = {"replica": "engine", "installs": True, "ttl_s": 5}
    installer, takers = installer_of(opened(**options), engine, tells=True), []

    def take():
        if not takers:
            takers.append(installer_of(opened(**options), other, tells=True))
            # A read that it stops may have written.
            until(lambda: installer.handle.state == "gone")

    first = trainer.publish(1)
    installer.install(1, 20)
    if when == "before":
        take()
    else:
        installer._engine.looked = take
    second = trainer.publish(2)
    with pytest.raises(Fenced, match="'engine'.*close this handle and open a new one"):
        installer.install(2, 20)
    assert engine.has(first)
    assert installer.active == 1
    takers[0].install(2, 20)
    assert other.has(second)
    assert trainer.handle.installs()["engine"].active.version == 2


def test_a_large_tensor_is_read_in_place_as_it_was_published(opened, monkeypatch):
    """Nobody looks for a NaN in it. Digests compare bits: a NaN is equal to itself."""
    monkeypatch.setattr(landing_plan, "SMALL_BYTES", 15)
    engine, publisher = Fused(), Publisher(opened(digests="full"))
    follower = opened(digests="full")
    installer = installer_of(follower, engine)
    bits = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000, 0x7F800000], dtype=torch.int32)
    publisher.publish(1, norm=bits.view(torch.float32))
    installer.install(1, 20)
    assert torch.equal(engine.norm.weight.view(torch.int32), bits)
    assert installer.active == 1
    second = publisher.publish(2)
    installer.install(2, 20)
    assert engine.has(second)


@pytest.mark.parametrize("obstacles", [(), EVERYWHERE], ids=["in place", "staged"])
@pytest.mark.parametrize("fqn", ["norm", "k"])
def test_a_weight_that_is_no_number_is_refused(opened, trainer, obstacles, fqn):
    """Infinities are numbers: a mask may have them."""
    engine, keeper = Fused(), opened()
    installer = installer_of(opened(), engine, dict.fromkeys(obstacles, Obstacle("packed")))
    first = trainer.publish(1, norm=torch.tensor([-torch.inf, torch.inf, 0.0, 1.0]))
    installer.install(1, 20)
    keeper.register({name: torch.zeros_like(one) for name, one in first.items()})
    keeper.replicate(1, timeout_s=20)
    spoilt = first[fqn].clone()
    spoilt.view(-1)[-1] = torch.nan
    trainer.publish(2, **{fqn: spoilt})
    with pytest.raises(ManifestMismatch, match=f"'{fqn}' of version 2.*found a NaN"):
        installer.install(2, 20)
    assert engine.has(first)
    assert installer.active == 1


def test_a_nan_on_one_rank_is_refused_on_all(pair, trainer):
    engines, _, installers, each = pair
    first = trainer.publish(1)
    for installer in installers:
        installer.options = InstallOptions(on_failure="keep")
    each(lambda rank: installers[rank].install(1, 30))
    spoilt = first["k"].clone()
    spoilt[1, 0] = torch.nan  # a row of the second rank
    trainer.publish(2, k=spoilt)

    def attempt(rank):
        with pytest.raises(ManifestMismatch, match="'k' of version 2.*found a NaN"):
            installers[rank].install(2, 30)

    each(attempt)
    assert all(engine.has(first) for engine in engines)
    assert {installer.active for installer in installers} == {1}


FLOATS = [getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8, torch.complex64], ids=str)
@pytest.mark.parametrize("place", [0, 777, 1023])
def test_one_nan_among_a_thousand_is_found(dtype, place):
    values = torch.ones(32, 32)
    values.view(-1)[place] = torch.nan
    assert has_nan(values.to(dtype))
    assert not has_nan(torch.ones(32, 32).to(dtype))
    if dtype not in FLOAT8:  # not all of these have infinities
        assert not has_nan(torch.tensor([torch.inf, -torch.inf, 1.0]).to(dtype))


@pytest.mark.parametrize("tensor", [torch.ones(0), torch.ones(3, dtype=torch.int8)], ids=str)
def test_what_has_no_nan(tensor):
    assert not has_nan(tensor)


def test_a_loader_that_looks_at_a_value_gets_all_tensors_and_that_value(opened, trainer):
    class Looking(Fused):
        def load_weights(self, weights):
            for fqn, weight in weights:
                scaled = weight * 2 if fqn == "norm" and weight[0].item() > 0 else weight
                super().load_weights([(fqn, scaled)])

    engine = Looking()
    installer = installer_of(opened(), engine)
    for version, sign in ((1, 1.0), (2, -1.0)):
        norm = torch.full((4,), sign)
        published = trainer.publish(version, norm=norm)
        report = installer.install(version, 20)
        assert not report.direct
        assert engine.has(published | {"norm": norm * 2 if sign > 0 else norm})


@pytest.mark.parametrize("scale", ["out_scale", "out_scale_inv"])
def test_float8_weights_are_refused_where_nothing_takes_their_scales(opened, trainer, scale):
    """The engine would multiply by a weight that was divided, and nobody would say so."""
    engine, published = Fused(), torch.ones(4, 4).to(torch.float8_e4m3fn)
    trainer.publish(1, out=published, **{scale: torch.ones(4, 1)})
    with pytest.raises(ManifestMismatch, match=rf"a place for '{scale}'.*none, and cast from"):
        installer_of(opened(), engine).install(1, 20)
    assert float(engine.norm.weight[0]) == OLD
    version = trainer.publish(2, out=published)  # never scaled
    installer_of(opened(), engine).install(2, 20)
    assert engine.has(version | {"out": torch.ones(4, 4)})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"vision": torch.ones(3)}, r"vision \[3\]: 3 elements the loader raised AttributeError"),
        ({"k": torch.ones(3, 4)}, r"k \[3, 4\]: 4 elements;"),
        ({"k": torch.ones(3, 4, dtype=torch.float64)}, r"k \[3, 4\]: 4 elements cast from"),
        ({"unused": torch.ones(2)}, r"unused \[2\]: 2 elements;"),
        ({"k": torch.ones(3, 4), "unused": torch.ones(2)}, "k .*, unused"),
    ],
    ids=["no place", "too many rows", "too many rows, cast", "left out", "several"],
)
@pytest.mark.parametrize("obstacles", [(), EVERYWHERE], ids=["in place", "staged"])
def test_a_version_with_an_element_that_lands_nowhere_is_refused(
    opened, trainer, changes, found, obstacles
):
    class Skipping(Fused):
        def load_weights(self, weights):
            super().load_weights(one for one in weights if one[0] != "unused")

    engine = Skipping()
    installer = installer_of(opened(), engine, dict.fromkeys(obstacles, Obstacle("packed")))
    trainer.publish(1, **changes)
    for _ in range(2):
        with pytest.raises(ManifestMismatch, match="a place for every element.*none for " + found):
            installer.install(1, 20)
        assert float(engine.norm.weight[0]) == OLD
    published = trainer.publish(2)
    installer.install(2, 20)
    assert engine.has(published)


def test_a_tensor_that_is_to_be_ignored_is(opened, trainer):
    engine = Fused()
    published = trainer.publish(1, **{"vision.a": torch.ones(3), "k": torch.ones(3, 4)})
    options = {"ignore": ["vision.*", "k"]}
    report = installer_of(opened(), engine, **options).install(1, 20)
    assert engine.has(published | {"k": published["k"][:2]})
    assert list(report.ignored) == ["vision.a"]


def test_a_version_that_does_not_come_is_waited_for_until_the_deadline(opened):
    engine = Fused()
    with pytest.raises(DeadlineExceeded, match="version"):
        installer_of(opened(), engine).install(9, 0.3)
    assert float(engine.norm.weight[0]) == OLD


@pytest.mark.parametrize(
    "options",
    [{"direct": "always"}, {"on_failure": "retry"}, {"buffer_bytes": 0}, {"relay": "yes"}],
)
def test_options_are_checked(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))}="):
        InstallOptions(**options)


# -- failures in the middle


@pytest.mark.parametrize("on_failure", ["reread", "keep", "refuse"])
def test_a_failure_after_the_first_byte(opened, trainer, on_failure):
    """The last version is there again, from a peer or from a copy; or the engine has none."""
    engine, follower, other = Fused(), opened(installs=True), opened()
    obstacles = {"out.weight": Obstacle("packed")}
    installer = installer_of(follower, engine, obstacles, tells=True, on_failure=on_failure)
    first = trainer.publish(1)
    installer.install(1, 20)
    if on_failure == "reread":
        other.register({fqn: torch.zeros_like(one) for fqn, one in first.items()})
        other.replicate(1, timeout_s=20)
    trainer.publish(2)
    module = engine.load_weights
    engine.raises = "out"

    def once(weights):
        try:
            module(weights)
        finally:
            engine.raises = None

    engine.load_weights = once
    with pytest.raises(RuntimeError, match="gives up"):
        installer.install(2, 20)
    assert installer.active == (None if on_failure == "refuse" else 1)
    told = trainer.handle.installs()[follower.replica]
    assert (told.active.version if told.active else None) == installer.active
    assert (told.rejected.ref.version, told.rejected.rank) == (2, 0)
    assert "gives up" in told.rejected.reason
    assert engine.has(first) == (on_failure != "refuse")
    del engine.load_weights
    third = trainer.publish(3)
    installer.install(3, 20)
    assert engine.has(third)
    assert installer.active == 3


# -- failures in a row


@pytest.fixture
def clock(monkeypatch):
    """A clock of installers, which goes on by hand: `clock.now_s += 1`."""
    clock = SimpleNamespace(now_s=0.0, perf_counter=time.perf_counter)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(installation, "time", clock)
    return clock


def fail(installer, version):
    with pytest.raises((TorchRosError, RuntimeError), match="gives up"):
        installer.install(version, 20)


def test_a_content_that_fails_again_and_again_is_refused_for_a_while(
    opened, trainer, clock, caplog
):
    engine = Fused()
    installer = installer_of(opened(), engine, direct="never")
    loads, engine.raises = installer._engine.loads, "out"
    trainer.publish(1)
    for _ in range(3):
        fail(installer, 1)
    assert len(loads) == 3
    for clock.now_s, tried in ((0.9, 3), (1.0, 4), (2.9, 4), (3.0, 5)):
        fail(installer, 1)
        assert len(loads) == tried
    warned = [one for one in caplog.messages if "has failed 3 times in a row" in one]
    assert len(warned) == 1
    assert "version 1 of model 'm'" in warned[0]
    assert "the loader gives up" in warned[0]


def test_another_content_is_tried_at_once_after_failures_in_a_row(opened, trainer, clock):
    engine = Fused()
    installer = installer_of(opened(), engine, direct="never")
    engine.raises = "out"
    trainer.publish(1)
    for _ in range(4):
        fail(installer, 1)
    engine.raises = None
    published = trainer.publish(2)
    installer.install("latest", 20)
    assert engine.has(published)
    assert len(installer._engine.loads) == 4


def test_a_version_that_got_in_ends_the_row(opened, trainer, clock):
    engine = Fused()
    installer = installer_of(opened(), engine, direct="never")
    published = trainer.publish(1)
    for raises in ("out", "out", None, "out", "out"):
        engine.raises = raises
        if raises:
            fail(installer, 1)
        else:
            installer.install(1, 20)
    engine.raises = None
    installer.install(1, 20)
    assert engine.has(published)


# -- others write to it


def test_an_engine_that_others_have_loaded_has_no_version(opened, trainer):
    engine, follower = Fused(), opened(installs=True)
    installer = installer_of(follower, engine, tells=True)
    first = trainer.publish(1)
    installer.install(1, 20)
    installer.withdraw("loaded by hand")
    assert installer.active is follower.version is None
    told = trainer.handle.installs()[follower.replica]
    assert told.active is None
    assert (told.rejected.ref.version, told.rejected.reason) == (1, "loaded by hand")
    engine.load_weights({fqn: torch.zeros_like(one) for fqn, one in first.items()}.items())
    trainer.publish(2, norm=None)
    with pytest.raises(ManifestMismatch):
        installer.install(2, 20)
    assert installer.active is None  # nobody claims that it has version 1 again
    third = trainer.publish(3)
    installer.install(3, 20)
    assert engine.has(third)
    assert trainer.handle.installs()[follower.replica].active.version == 3


# -- an engine that makes something else of its weights once they are loaded


def loaded(follower, trainer, module=None):
    """An installer with version 1, which it does not offer yet, and what was published."""
    installer = installer_of(follower, module or Fused(), relay=False)
    published = trainer.publish(1)
    installer.install(1, 20)
    installer.options = InstallOptions()
    return installer, published


def move(module):
    """Give a module's weight other memory."""
    storage = StorageWeakRef(module.weight.untyped_storage())
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    return storage


def assert_offered(reader, published):
    reader.register(got := {fqn: torch.zeros_like(one) for fqn, one in published.items()})
    reader.replicate(1, timeout_s=20)
    assert all(torch.equal(got[fqn], one) for fqn, one in published.items())


def test_a_version_that_lies_where_it_was_read_is_offered_in_the_end(opened, trainer):
    follower = opened()
    installer, published = loaded(follower, trainer)
    assert installer.settle(20)
    assert (installer.active, follower.version) == (1, 1)
    trainer.handle.unpublish()
    assert_offered(opened(), published)


@pytest.mark.parametrize("is_early", [True, False], ids=["before it is left", "afterwards"])
def test_memory_that_the_engine_has_left_is_let_go_and_not_offered(is_early, opened, trainer):
    engine, follower = Fused(), opened()
    installer, _ = loaded(follower, trainer, engine)
    if is_early:
        installer.let_go()
    left = move(engine.out)
    assert left.expired() == is_early  # else it is registered
    assert not installer.settle(20)
    assert left.expired()
    assert (installer.active, follower.version) == (1, None)
    published = trainer.publish(2)
    installer.install(2, 20)
    assert engine.has(published)
    assert follower.version == 2


def test_weights_of_which_the_engine_makes_something_are_not_offered(opened, trainer):
    follower = opened()
    installer, _ = loaded(follower, trainer)
    installer._engine.stands_in_the_way = {"out.weight": Obstacle("packed")}
    assert not installer.settle(20)
    assert (installer.active, follower.version) == (1, None)


def test_a_version_that_was_published_anew_by_then_is_not_offered(opened, trainer, caplog):
    follower = opened()
    installer, _ = loaded(follower, trainer)
    trainer.publish(1)
    assert not installer.settle(20)
    assert "version 1 is not offered to others" in caplog.text
    assert (installer.active, follower.version) == (1, None)


def test_a_version_that_cannot_be_offered_for_whatever_reason_stays(opened, trainer, monkeypatch):
    follower = opened()
    installer, _ = loaded(follower, trainer)

    def fail(**_):
        raise OSError("no memory for one more registration")

    monkeypatch.setattr(follower, "serve", fail)
    assert not installer.settle(20)
    assert (installer.active, follower.version) == (1, None)


def test_an_engine_without_a_version_offers_nothing(opened):
    follower = opened()
    assert not installer_of(follower, Fused()).settle(20)
    assert follower.version is None


def test_an_engine_whose_modules_have_other_names_by_now_is_recorded_anew(opened, trainer):
    """As adapters give them."""
    engine = Fused()
    installer, _ = loaded(opened(), trainer, engine)
    assert installer.settle(20)
    engine.inner, engine.out = engine.out, None
    load = engine.load_weights

    def renamed(weights):
        engine.out = engine.inner
        load(weights)
        engine.out = None

    engine.load_weights = renamed
    installer.forget()
    published = trainer.publish(2)
    installer.install(2, 20)
    assert torch.equal(engine.inner.weight, published["out"])


# -- several ranks


@pytest.fixture
def pair(place):
    """Two ranks, each a handle and an engine; `pair(step)` is what `step(rank)` gives on each."""
    peers, engines = Together(2), [Fused(rank, 2) for rank in range(2)]
    toys = [Toy(engine) for engine in engines]
    installers = [None, None]
    with ThreadPoolExecutor(2) as threads:

        def each(step):
            return [future.result(90) for future in [threads.submit(step, r) for r in range(2)]]

        def prepare(rank):
            options = {**place, "replica": "pair", "rank": rank, "world_size": 2}
            handle = torch_ros.open("m", **options, installs=True)
            peer = peers.of(rank)
            installers[rank] = Installer(handle, toys[rank], InstallOptions(), peer, teller=handle)

        each(prepare)
        yield engines, toys, installers, each
        each(lambda rank: installers[rank].handle.close(linger_s=0))


def test_ranks_read_their_parts_and_offer_the_whole(pair, trainer, opened):
    engines, _, installers, each = pair
    published = trainer.publish(1)
    reports = each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(published) for engine in engines)
    assert [report.direct_share for report in reports] == [1, 1]
    trainer.handle.unpublish()
    assert_offered(opened(), published)


def test_ranks_offer_what_lies_where_it_was_read_on_all_of_them_or_nothing(pair, trainer):
    engines, _, installers, each = pair
    for installer in installers:
        installer.options = InstallOptions(relay=False)
    trainer.publish(1)
    each(lambda rank: installers[rank].install("latest", 30))
    for installer in installers:
        installer.options = InstallOptions()
    move(engines[1].norm)
    assert each(lambda rank: installers[rank].settle(30)) == [False, False]
    assert {installer.handle.version for installer in installers} == {None}
    published = trainer.publish(2)
    each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(published) for engine in engines)
    assert {installer.handle.version for installer in installers} == {2}


def test_ranks_may_stage_different_tensors(pair, trainer):
    engines, toys, installers, each = pair
    toys[1].stands_in_the_way = {name: Obstacle("packed") for name in state_of(engines[1])}
    for installer in installers:
        installer.options = InstallOptions(buffer_bytes=1)
    published = trainer.publish(1)
    reports = each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(published) for engine in engines)
    assert [sorted(report.staged) for report in reports] == [[], ["k", "norm", "out", "q"]]
    assert {installer.handle.version for installer in installers} == {None}


def test_an_element_that_lands_on_no_rank_is_refused_on_all(pair, trainer):
    """Each rank has one of two rows, and nobody has the third."""
    engines, _, installers, each = pair
    trainer.publish(1, k=torch.ones(3, 4))

    def attempt(rank):
        with pytest.raises(ManifestMismatch, match=r"none for k \[3, 4\]: 4 elements"):
            installers[rank].install("latest", 30)

    each(attempt)
    assert {float(engine.norm.weight[0]) for engine in engines} == {OLD}
    published = trainer.publish(2)
    each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(published) for engine in engines)


def test_a_rank_that_refuses_does_so_for_all_before_a_byte_is_written(pair, trainer):
    engines, _, installers, each = pair
    engines[1].bias = nn.Parameter(torch.zeros(3))
    trainer.publish(1)

    def attempt(rank):
        with pytest.raises(ManifestMismatch, match="nothing for bias"):
            installers[rank].install("latest", 30)

    each(attempt)
    assert float(engines[0].norm.weight[0]) == OLD


def test_ranks_that_others_have_loaded_have_no_version(pair, trainer):
    engines, _, installers, each = pair
    published = trainer.publish(1)
    each(lambda rank: installers[rank].install("latest", 30))
    each(lambda rank: installers[rank].withdraw("loaded by hand"))
    told = trainer.handle.installs()["pair"]
    assert (told.active, told.rejected.reason) == (None, "loaded by hand")
    assert {installer.handle.version for installer in installers} == {None}
    for engine in engines:
        engine.load_weights({fqn: torch.zeros_like(one) for fqn, one in published.items()}.items())
    each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(published) for engine in engines)
    assert trainer.handle.installs()["pair"].active.version == 1


def test_a_rank_that_fails_in_the_middle_fails_all(pair, trainer):
    engines, toys, installers, each = pair
    for toy in toys:
        toy.stands_in_the_way = {"out.weight": Obstacle("packed")}
    first = trainer.publish(1)
    each(lambda rank: installers[rank].install("latest", 30))
    engines[1].raises = "out"
    trainer.publish(2)
    errors = []

    def attempt(rank):
        with pytest.raises((TorchRosError, RuntimeError), match="gives up") as caught:
            installers[rank].install("latest", 5)
        errors.append(caught.value)

    each(attempt)
    assert len(errors) == 2
    assert {installer.active for installer in installers} == {None}
    engines[1].raises = None
    third = trainer.publish(3)
    each(lambda rank: installers[rank].install("latest", 30))
    assert all(engine.has(third) for engine in engines)
    assert not engines[0].has(first)


def test_all_ranks_refuse_a_content_that_one_of_them_cannot_load(pair, trainer, clock):
    engines, toys, installers, each = pair
    for toy in toys:
        toy.stands_in_the_way = {"out.weight": Obstacle("packed")}
    trainer.publish(1)
    engines[1].raises = "out"
    for loads in (1, 2, 3, 3):
        each(lambda rank: fail(installers[rank], 1))
        assert [len(toy.loads) for toy in toys] == [loads, loads]
    engines[1].raises = None
    clock.now_s = 1
    each(lambda rank: installers[rank].install(1, 30))
    assert {installer.active for installer in installers} == {1}
