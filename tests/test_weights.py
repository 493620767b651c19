"""Files of weights: what is read, what is refused and without running anything,
the name computed from the content, the store, and the fit."""

import os
import pickle
import socket
import urllib.error
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hmoe_repro.core.devices import import_torchvision
from hmoe_repro.core.errors import HmoeError
from hmoe_repro.networks.backbones import LARGE
from hmoe_repro.networks.pretrained import (
    PIP_PACKAGE,
    WEIGHTS,
    fetch_weights,
    find_weights,
    fit_weights,
    keep_weights,
    kept_path,
    kept_weights,
    name_of_weights,
    read_weights,
    resolve_weights,
    strip_prefix,
    weights_for,
)
from hmoe_repro.networks.sparse_vit import SPARSE


def state(seed=0):
    torch.manual_seed(seed)
    return {
        "conv.weight": torch.randn(4, 3, 3, 3),
        "conv.bias": torch.randn(4),
        "norm.running_var": torch.rand(4),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(5).half(),
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a
    )


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The same tensors as safetensors, as a torch file, in the older torch format,
    and wrapped in two ways; they are kept in the folder `weights` next to them."""
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    s = state()
    save_file(s, tmp_path / "a.safetensors")
    torch.save(s, tmp_path / "a.pth")
    torch.save(s, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"epoch": 3, "optimizer": {"lr": 0.1}, "state_dict": s}, tmp_path / "lightning.ckpt")
    torch.save(
        {"model": {k: nn.Parameter(v) if v.is_floating_point() else v for k, v in s.items()}},
        tmp_path / "deit.pth",
    )
    return tmp_path


NAMES = ["a.safetensors", "a.pth", "old.pth", "lightning.ckpt", "deit.pth"]


# Reading


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_tensors_and_the_same_name(files, name):
    read = read_weights(files / name)
    assert same(read, state())
    assert not any(v.requires_grad for v in read.values())
    assert name_of_weights(read) == name_of_weights(state())


def test_the_format_follows_from_the_bytes_and_not_from_the_name(files):
    (files / "a.safetensors").rename(files / "b.pth")
    (files / "a.pth").rename(files / "b.safetensors")
    assert same(read_weights(files / "b.pth"), read_weights(files / "b.safetensors"))


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    "make",
    [
        lambda value, path: torch.save(value, path),
        lambda value, path: Path(path).write_bytes(pickle.dumps(value, 2)),
    ],
)
def test_a_pickle_runs_nothing(tmp_path, make):
    make({"w": torch.zeros(2), "x": Hostile(str(tmp_path / "ran"))}, tmp_path / "evil.pth")
    with pytest.raises(HmoeError, match="Fix: .*random"):
        read_weights(tmp_path / "evil.pth")
    assert not (tmp_path / "ran").exists()


def test_a_whole_module_is_refused_with_the_way_to_save_it(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(
        HmoeError, match=r"Python objects.*torch.save\(model.state_dict\(\), file\)"
    ):
        read_weights(tmp_path / "module.pth")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [0, 1, 8, 9, 60, 0.5, 0.9, -1])
def test_a_cut_file_is_refused(files, name, part):
    whole = (files / name).read_bytes()
    (files / "cut").write_bytes(
        whole[: int(part * len(whole)) if isinstance(part, float) else part]
    )
    with pytest.raises(HmoeError, match="'cut' cannot be used") as caught:
        read_weights(files / "cut")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content",
    [
        b"these are no weights\n",
        b"{}",
        b"\x89PNG\r\n\x1a\n" + bytes(50),
        bytes(100),
        (2**63 - 1).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "cut").write_bytes(content)
    with pytest.raises(HmoeError, match="'cut' cannot be used"):
        read_weights(tmp_path / "cut")


@pytest.mark.parametrize(
    "content",
    [
        {},
        [torch.zeros(1)],
        {"w": 3},
        {"w": torch.zeros(1), "note": "x"},
        torch.zeros(3),
        {3: torch.zeros(1)},
        {"w": torch.zeros(2, 2).to_sparse()},
        {"w": torch.zeros(2, device="meta")},
    ],
)
def test_what_is_no_table_of_tensors_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(HmoeError, match="no table of names and tensors"):
        read_weights(tmp_path / "w.pth")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(HmoeError, match="No such file"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(HmoeError, match="directory"):
        read_weights(tmp_path)


# The name and the store


def test_the_name_depends_on_every_part_of_the_content():
    s = state()
    names = {
        name_of_weights(x)
        for x in (
            s,
            {k: v for k, v in s.items() if k != "half"},
            s | {"half": s["half"].float()},
            s | {"conv.bias": s["conv.bias"].view(2, 2)},
            s | {"conv.bias": torch.nextafter(s["conv.bias"], torch.tensor(9.0))},
            {f"x.{k}": v for k, v in s.items()},
        )
    }
    assert len(names) == 6
    assert all(len(n) == 17 and n.startswith("file-") for n in names)
    turned = s | {"conv.weight": s["conv.weight"].contiguous(memory_format=torch.channels_last)}
    assert name_of_weights(turned) == name_of_weights(s) == name_of_weights(dict(sorted(s.items())))


@pytest.mark.parametrize("name", NAMES)
def test_kept_weights_are_found_by_name_alone(files, name):
    kept = keep_weights(files / name)
    assert kept == name_of_weights(state())
    assert str(files) not in kept
    (files / name).unlink()
    assert same(kept_weights(kept), state())
    assert same(load_file(kept_path(kept)), state())
    assert [p.name for p in (files / "weights").iterdir()] == [f"{kept}.safetensors"]


def test_the_store_is_beside_the_runs(monkeypatch, files):
    monkeypatch.setenv("HMOE_RUNS", str(files / "runs"))
    kept = keep_weights(files / "a.pth")
    assert (files / "runs" / "weights" / f"{kept}.safetensors").exists()
    assert same(find_weights(kept, "resnet18"), state())


def test_tensors_that_share_memory_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("HMOE_RUNS", str(tmp_path))
    w = torch.randn(4, 4)
    torch.save({"a": w, "b": w, "c": w[1:], "t": w.t()}, tmp_path / "tied.pth")
    read = kept_weights(keep_weights(tmp_path / "tied.pth"))
    assert torch.equal(read["a"], read["b"])
    assert torch.equal(read["c"], w[1:])
    assert torch.equal(read["t"], w.t())


def test_keeping_twice_writes_once_and_mends_what_was_changed(files):
    kept = keep_weights(files / "a.pth")
    path = kept_path(kept)
    before = path.stat().st_mtime_ns, path.stat().st_ino
    keep_weights(files / "a.safetensors")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    for damage in (
        lambda: path.write_bytes(path.read_bytes()[:-3]),
        lambda: save_file(state(1), path),
        path.unlink,
    ):
        damage()
        with pytest.raises(HmoeError, match="Fix: "):
            kept_weights(kept)
        keep_weights(files / "a.pth")
        assert same(kept_weights(kept), state())


def test_a_copy_that_is_interrupted_leaves_nothing(files, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            keep_weights(files / "a.pth")
    assert list((files / "weights").iterdir()) == []
    assert same(kept_weights(keep_weights(files / "a.pth")), state())


def test_a_store_that_cannot_be_written_is_an_error(files):
    (files / "weights").write_text("a file")
    with pytest.raises(HmoeError, match="cannot write"):
        keep_weights(files / "a.pth")


# The fit


def network():
    torch.manual_seed(5)
    return nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)})


def good(seed=1):
    torch.manual_seed(seed)
    return {
        k: torch.randn(v.shape) if v.is_floating_point() else v
        for k, v in network().state_dict().items()
    }


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model.", "backbone.body."])
def test_a_prefix_of_all_names_is_removed(prefix):
    net = network()
    done = fit_weights(
        net,
        {prefix + k: v for k, v in good().items()} | {prefix + "fc.weight": torch.zeros(9)},
        ("fc.",),
    )
    assert done == {"prefix": prefix, "ignored": ["fc.weight"], "repaired": []}
    assert same(dict(net.state_dict()), good())


@pytest.mark.parametrize(
    "names, wanted, prefix",
    [
        (
            ["conv.w", "conv.b"],
            ["conv.w", "conv.b"],
            "",
        ),  # one word in common, and it is the network's own
        (["module.conv.w", "conv.b"], ["conv.w", "conv.b"], ""),  # not all of them
        (["module.conv.w", "module.conv.b"], ["conv.w", "conv.b"], "module."),
        (["model.model.w"], ["w"], "model.model."),
        (["model.w", "model.v"], ["model.w"], ""),
        (["w"], ["v"], ""),
        (["x.w"], ["x"], ""),
    ],
)
def test_when_a_prefix_is_one(names, wanted, prefix):
    found, stripped = strip_prefix({n: n for n in names}, wanted)
    assert found == prefix
    assert all(found + k == v for k, v in stripped.items())
    assert len(stripped) == len(names)


def test_types_are_converted_and_the_counter_may_be_missing():
    net = network()
    fit_weights(net, {k: v.double() for k, v in good().items() if k != "norm.num_batches_tracked"})
    assert net["conv"].weight.dtype == torch.float32
    assert torch.equal(net["conv"].weight, good()["conv.weight"])


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.pop("conv.bias"), "missing conv.bias"),
        (lambda s: s.pop("norm.running_mean"), "missing norm.running_mean"),
        (lambda s: s.update({"dist_token": torch.zeros(1)}), "unexpected dist_token"),
        (
            lambda s: s.update({"conv.weight": torch.zeros(4, 1, 3, 3)}),
            r"conv.weight is \(4, 1, 3, 3\) and not \(4, 3, 3, 3\)",
        ),
        (
            lambda s: s.update({"conv.bias": torch.zeros(4, dtype=torch.int8)}),
            "not floating point: conv.bias",
        ),
        (lambda s: s["norm.weight"][2:].fill_(float("nan")), "not a number: norm.weight"),
        (
            lambda s: s["norm.weight"][2:].fill_(float("inf")),
            "infinite or not a number: norm.weight",
        ),
        (
            lambda s: s.update({f"extra.{i}": torch.zeros(1) for i in range(9)}),
            "unexpected extra.0, extra.1, extra.2, extra.3, extra.4 and 4 more",
        ),
    ],
)
def test_a_misfit_is_named_and_changes_nothing(change, says):
    net, s = network(), good()
    change(s)
    with pytest.raises(HmoeError, match=says + ".*Fix: .*random") as caught:
        fit_weights(net, s, what="the little one")
    assert "the little one" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same(dict(net.state_dict()), dict(network().state_dict()))


def test_a_repair_is_used_only_where_the_shape_differs_and_must_succeed():
    net, asked = network(), []

    def widen(given, wanted):
        asked.append(tuple(given.shape))
        return given.expand(-1, 3, -1, -1)

    fit_weights(net, good(), repairs={"conv.weight": widen, "absent": widen})
    assert asked == []
    narrow = good() | {"conv.weight": torch.ones(4, 1, 3, 3)}
    assert fit_weights(net, narrow, repairs={"conv.weight": widen})["repaired"] == ["conv.weight"]
    assert asked == [(4, 1, 3, 3)]
    assert torch.equal(net["conv"].weight, torch.ones(4, 3, 3, 3))
    assert narrow["conv.weight"].shape[1] == 1
    with pytest.raises(HmoeError, match="another shape"):
        fit_weights(net, narrow, repairs={"conv.weight": lambda given, wanted: given})


# Names


def test_every_published_name_is_known_to_its_publisher_and_to_a_network_of_ours():
    import_torchvision()
    import timm
    from torchvision import models

    known = set(timm.list_pretrained())
    for name, networks in WEIGHTS.items():
        if name == PIP_PACKAGE:  # tests/test_timm_models.py
            continue
        assert networks
        assert set(networks) <= {*LARGE, *SPARSE}
        for network in networks:
            network = SPARSE.get(network, network)
            assert (
                name in models.get_model_weights(network).__members__
                if name.startswith("IMAGENET")
                else name in known and name.startswith(network + "_patch16_224.")
            )
    assert all(len(weights_for(n)) > 1 and weights_for(n)[0] == "random" for n in LARGE)


def test_a_user_may_name_weights_in_three_ways(files):
    assert (
        resolve_weights("random", "resnet18") == "random" == resolve_weights("random", "small_cnn")
    )
    assert resolve_weights("IMAGENET1K_V1", "resnet50") == "IMAGENET1K_V1"
    kept = resolve_weights(str(files / "a.pth"), "resnet18")
    assert (
        kept
        == resolve_weights(kept, "resnet18")
        == resolve_weights(files / "a.safetensors", "resnet18")
    )
    assert find_weights("random", "resnet18") is None
    assert same(find_weights(files / "a.pth", "resnet18"), state())


def test_wrong_names_list_the_right_ones(tmp_path):
    for call in (resolve_weights, find_weights):
        with pytest.raises(HmoeError, match="Valid: random, IMAGENET1K_V1"):
            call("IMAGENET1K_V2", "resnet18")
        with pytest.raises(
            HmoeError,
            match="neither a known name nor a file. Valid for resnet18: random, IMAGENET1K_V1",
        ):
            call("imagenet", "resnet18")
        with pytest.raises(HmoeError, match="neither a known name nor a file"):
            call(str(tmp_path / "gone.pth"), "resnet18")
        with pytest.raises(HmoeError, match="Valid: random"):
            call("IMAGENET1K_V1", "small_cnn")
    with pytest.raises(HmoeError, match="file-0123456789ab are not in .*Fix: give"):
        find_weights("file-0123456789ab", "resnet18")
    with pytest.raises(HmoeError, match="Valid: deit_small_patch16_224.fb_in1k"):
        fetch_weights("IMAGENET1K_V1", "deit_small")


# Fetching


def test_published_weights_that_cannot_be_had_are_an_error_with_the_address(monkeypatch):
    import_torchvision()
    from torchvision.models import _api

    def offline(*args, **kwargs):
        assert kwargs["weights_only"]
        assert kwargs["check_hash"]
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(_api, "load_state_dict_from_url", offline)
    address = r"download https://.*resnet18-.*\.pth.*give that file.*random"
    with pytest.raises(HmoeError, match=rf"Name or service not known.*{address}") as caught:
        find_weights("IMAGENET1K_V1", "resnet18")
    assert "\n" not in str(caught.value)


def test_a_transformer_that_cannot_be_had_is_an_error_with_the_place_at_once(monkeypatch, hub):
    def unknown(host, port):
        raise OSError(-2, f"Name or service not known\nmore lines about {host}")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    place = r"model.safetensors of timm/deit_small_patch16_224.fb_in1k"
    with pytest.raises(HmoeError, match=rf"service not known\).*{place}.*random") as caught:
        find_weights("deit_small_patch16_224.fb_in1k", "deit_small")
    assert "more lines" not in str(caught.value)
    assert hub == []


def test_behind_a_proxy_the_hub_is_asked_anyway(monkeypatch, hub):
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: 1 / 0)
    assert same(find_weights("deit_small_patch16_224.fb_in1k", "deit_small"), state())
    assert hub == ["timm/deit_small_patch16_224.fb_in1k"]


def test_weights_in_the_cache_need_no_network(monkeypatch, hub, files):
    import huggingface_hub

    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name: str(files / "a.safetensors")
    )
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: 1 / 0)
    assert same(find_weights("deit_small_patch16_224.fb_in1k", "deit_small"), state())
    assert hub == []


@pytest.fixture
def hub(monkeypatch):
    "A hub with an empty cache and no proxy before it; the list of what was fetched from it."
    import_torchvision()
    import huggingface_hub
    import timm

    for name in (
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    fetched = []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, name: None)
    monkeypatch.setattr(
        timm.models, "load_state_dict_from_hf", lambda repo: fetched.append(repo) or state()
    )
    return fetched
