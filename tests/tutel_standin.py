"""A stand-in for `tutel.moe`: its interface, names, shapes, capacity and traps, token by token.

Written from a description of Tutel (82af7aa) and not from `method.sparse_moe`: slow, plain Python
over tokens, so that an agreement of the two says something. Float32 only, one process."""

import math
import sys
import types

import torch
from torch import nn


class LinearGate(nn.Module):
    def __init__(self, model_dim, experts):
        super().__init__()
        self.wg = nn.Linear(model_dim, experts, bias=False)

    def forward(self, x):
        return self.wg(x)


class CosineGate(nn.Module):
    def __init__(self, model_dim, experts):
        super().__init__()
        self.temperature = nn.Parameter(torch.log(torch.full([1], 2.0)))
        self.cosine_projector = nn.Linear(model_dim, 256)
        self.sim_matrix = nn.Parameter(0.01 * torch.randn(256, experts))

    def forward(self, x):
        a = self.cosine_projector(x)
        a = a / a.norm(dim=1, keepdim=True).clamp(min=1e-12)
        s = self.sim_matrix / self.sim_matrix.norm(dim=0, keepdim=True).clamp(min=1e-12)
        return a @ s * self.temperature.clamp(max=math.log(100)).exp()


class Experts(nn.Module):
    def __init__(self, count, dim, hidden, activation_fn):
        super().__init__()
        first = [nn.Linear(dim, hidden) for _ in range(count)]
        second = [nn.Linear(hidden, dim) for _ in range(count)]
        self.activation_fn = activation_fn
        self.batched_fc1_w = nn.Parameter(torch.stack([m.weight.data for m in first]))
        self.batched_fc2_w = nn.Parameter(torch.stack([m.weight.data.T for m in second]))
        self.batched_fc1_bias = nn.Parameter(torch.stack([m.bias.data for m in first]))
        self.batched_fc2_bias = nn.Parameter(torch.stack([m.bias.data for m in second]))
        for parameter in self.parameters():
            parameter._tutel_expert = True

    def forward(self, x):
        hidden = [row @ w.T + b for row, w, b in zip(x, self.batched_fc1_w, self.batched_fc1_bias)]
        hidden = torch.stack(hidden)
        acted = self.activation_fn(hidden)
        assert acted.shape == hidden.shape
        return torch.stack(
            [row @ w + b for row, w, b in zip(acted, self.batched_fc2_w, self.batched_fc2_bias)]
        )


def emptied(given, wanted):
    "The entries of a dictionary, which is empty afterwards; unknown keys raise."
    options = {key: given.pop(key) for key in list(given)}
    unknown = set(options) - set(wanted)
    if unknown:
        raise Exception(f"Unrecognized argument: {unknown}")
    return options


class StandIn(nn.Module):
    "`moe.moe_layer`, with the arguments, attributes and state that the adapter relies on."

    def __init__(
        self,
        gate_type,
        model_dim,
        experts,
        batch_prioritized_routing=False,
        is_gshard_loss=True,
        normalize_gate=True,
        seeds=None,
    ):
        super().__init__()
        assert model_dim % 2 == 0, "model_dim must be even"
        assert seeds is None, "seeds move the global generator"
        kinds = {"top": LinearGate, "cosine_top": CosineGate}
        kind = kinds[gate_type.pop("type")]
        gate = emptied(gate_type, ("k", "fp32_gate", "gate_noise", "capacity_factor"))
        assert experts.pop("type") == "ffn"
        assert gate.pop("fp32_gate")
        ffn = emptied(
            experts, ("num_experts_per_device", "hidden_size_per_expert", "activation_fn")
        )
        count, hidden = ffn["num_experts_per_device"], ffn["hidden_size_per_expert"]
        self.experts = Experts(count, model_dim, hidden, ffn["activation_fn"])
        self.gates = nn.ModuleList([kind(model_dim, count)])
        self.gates[0].top_k = gate["k"]
        self.gates[0].gate_noise = gate["gate_noise"]
        self.gates[0].capacity_factor = gate["capacity_factor"]
        self.batch_prioritized_routing = batch_prioritized_routing
        self.is_gshard_loss, self.normalize_gate = is_gshard_loss, normalize_gate
        self.num_global_experts = count
        self.register_buffer("_num_global_experts", torch.tensor(count))

    def _load_from_state_dict(self, state, prefix, *args):
        assert int(state[prefix + "_num_global_experts"]) == self.num_global_experts
        super()._load_from_state_dict(state, prefix, *args)

    def _positions(self, scores, chosen):
        """Position of each token's j-th choice in its queue, and the capacity of c = 0: one more
        than the largest position in the last token's row, where an expert that the token did not
        choose stands with the earlier choices of all tokens."""
        n, k = len(chosen), len(chosen[0])
        order = list(range(n))
        if self.batch_prioritized_routing:
            order.sort(key=lambda i: -max(scores[i].tolist()))
        taken, found = [0] * self.num_global_experts, {}
        for j in range(k):
            row = list(taken)
            for i in order:
                e = chosen[i][j]
                found[i, j] = taken[e]
                taken[e] += 1
            row[chosen[-1][j]] = found[n - 1, j]
        return found, max(row) + 1 if self.batch_prioritized_routing else max(taken)

    def _capacity(self, n, factor, k, last):
        share = math.ceil(n / self.num_global_experts)
        if factor > 0:
            return k * int(factor * share)
        return last if factor == 0 else min(last, k * int(-factor * share))

    def _auxiliary(self, logits, noisy, chosen, gate):
        count, n = self.num_global_experts, len(chosen)
        if self.is_gshard_loss:
            scores, firsts = noisy.softmax(1), [row[0] for row in chosen]
            return sum(scores[:, e].sum() / n * (firsts.count(e) / n) * count for e in range(count))
        assert gate.gate_noise > 0, "`gate_noise` must be > 0"
        quiet, sigma = logits.softmax(1), gate.gate_noise / count
        importance, load = [], []
        for e in range(count):
            importance.append(sum(quiet[i, e] for i in range(n)))
            z = [(quiet[i, e] - noisy[i, chosen[i][-1]]) / sigma for i in range(n)]
            load.append(sum(0.5 * (1 + torch.erf(value / math.sqrt(2))) for value in z))
        ratios = []
        for amounts in (importance, load):
            mean = sum(amounts) / count
            variance = sum((a - mean) ** 2 for a in amounts) / (count - 1)
            ratios.append(variance / (mean**2 + 1e-10))
        return sum(ratios) / 2

    def _dispatched(self, x, chosen, found, capacity):
        "Rows (E, capacity, D) of the experts; places that nobody took are zero."
        rows = [[torch.zeros_like(x[0])] * capacity for _ in range(self.num_global_experts)]
        for (i, j), place in found.items():
            if place < capacity:
                rows[chosen[i][j]][place] = x[i]
        return torch.stack([torch.stack(row) for row in rows])

    @torch.compiler.disable
    def forward(self, given, capacity_factor=None):
        assert given.is_contiguous()
        assert given.dim() >= 2
        x = given.reshape(-1, given.shape[-1]).to(self.experts.batched_fc1_w.dtype)
        gate = self.gates[0]
        logits = noisy = gate(x)
        if self.training and gate.gate_noise > 0:
            noisy = logits + gate.gate_noise * torch.randn_like(logits) / self.num_global_experts
        scores = noisy.softmax(1)
        chosen = torch.topk(scores, gate.top_k, dim=1).indices.tolist()
        found, last = self._positions(scores, chosen)
        factor = capacity_factor or gate.capacity_factor
        capacity = self._capacity(len(x), factor, gate.top_k, last)
        outputs = self.experts(self._dispatched(x, chosen, found, capacity))
        tokens = []
        for i, experts in enumerate(chosen):
            total = sum(scores[i, e] for e in experts)
            y = torch.zeros_like(x[i])
            for j, e in enumerate(experts):
                if found[i, j] < capacity:
                    divided = gate.top_k > 1 and self.normalize_gate
                    value = scores[i, e] / total if divided else scores[i, e]
                    y = y + value * outputs[e, found[i, j]]
            tokens.append(y)
        y = torch.stack(tokens).view(given.shape).to(given.dtype)
        self.l_aux = y.l_aux = self._auxiliary(logits, noisy, chosen, gate)
        return y


def install(monkeypatch):
    "Make `from tutel import moe` give the stand-in for the time of a test."
    package, moe = types.ModuleType("tutel"), types.ModuleType("tutel.moe")
    package.moe, moe.moe_layer = moe, StandIn
    monkeypatch.setitem(sys.modules, "tutel", package)
    monkeypatch.setitem(sys.modules, "tutel.moe", moe)
