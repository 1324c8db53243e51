"""The operations of a decoder layer and what each saves, for families of transformers and, by
its linears alone, for a layer of any other.

What autograd saves of a transformer layer: Korthikanti et al. 2022, arXiv:2205.05198, section 4,
here operation by operation, as precision, kernel of attention, adapters and splitting change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rostra.plan.job import Layer, Linear, Sizes
from rostra.plan.memory.setting import ATTENTION, FLOAT, STYLES, UNKNOWN, Setting
from rostra.plan.memory.tape import Profile, Tape, Value


@dataclass(frozen=True)
class Program:
    """A layer's operations, its input, and which of them are attention and MLP."""

    tape: Tape
    start: Value
    attention: range
    mlp: range


@dataclass(frozen=True)
class _Tensor:
    """A value [tokens, width] of numbers of `each` bytes."""

    value: Value
    width: float
    each: int

    @property
    def size(self) -> complex:
        return self.value.size


def program(sizes: Sizes, layer: Layer, setting: Setting, first: bool = False) -> Program:
    """The operations of `layer`. The `first` of a frozen model has an input that no gradient
    flows to."""
    flows = setting.trains or not first or setting.adapted.kind == "prompt"
    return _Writer(sizes, layer, setting, flows).write()


def norm_profile(sizes: Sizes, setting: Setting) -> Profile:
    """The norm after the layers."""
    writer = _Writer(sizes, sizes.layers[0][0], setting, flows=True)
    writer._gathered(writer._norm(writer.start))
    return writer.tape.profile(writer.start.value)


class _Writer:
    def __init__(self, sizes: Sizes, layer: Layer, setting: Setting, flows: bool) -> None:
        self.sizes, self.layer, self.setting = sizes, layer, setting
        self.style = STYLES.get(sizes.family, UNKNOWN)
        self.tape = Tape()
        self.tokens = setting.tokens
        self.between = setting.tokens / setting.tensor
        size = self.between * sizes.hidden * setting.stream
        self.start = _Tensor(Value(size, flows), sizes.hidden, setting.stream)
        self.products = 0

    def write(self) -> Program:
        attention = [x for x in self.layer.linears if any(p in x.name for p in ATTENTION)]
        mlp = [x for x in self.layer.linears if x not in attention]
        x = self._gathered(self._norm(self.start))
        begin = len(self.tape.steps)
        x = self._attention(x, attention)
        middle = range(begin, len(self.tape.steps))
        x = self._norm(x) if self.style.after else x
        residual = self._add(self.start, x)
        x = self._gathered(self._norm(residual))
        begin = len(self.tape.steps)
        x = self._mlp(x, mlp)
        last = range(begin, len(self.tape.steps))
        x = self._norm(x) if self.style.after else x
        self._add(residual, x)
        return Program(self.tape, self.start.value, middle, last)

    # parts of a layer

    def _attention(self, x: _Tensor, linears: Sequence[Linear]) -> _Tensor:
        if not linears:
            return self._narrow(x)
        s, n = self.sizes, self.setting.tensor
        *projections, out = linears
        made = [self._linear(x, linear) for linear in projections]
        heads, kv = s.heads * s.head_size / n, s.kv_heads * s.head_size / n
        query, key, value = self._heads(made, heads, kv)
        if self.style.heads:
            query, key = self._norm(query), self._norm(key)
        if self.style.rotary:
            query, key = self._rotated(query), self._rotated(key)
        if self.setting.adapted.kind == "prefix":
            key, value = self._with_prefix(key), self._with_prefix(value)
        mixed = self._mixed(query, key, value)
        return self._sliced(self._linear(mixed, out))

    def _heads(
        self, made: list[_Tensor], heads: float, kv: float
    ) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Queries, keys and values; of one projection for all three, views of its result, and
        of projections that are arranged otherwise, of what joins them."""
        if len(made) == 3:
            return made[0], made[1], made[2]
        whole = made[0] if len(made) == 1 else self._run(*made)
        parts = []
        for width in (heads, kv, kv):
            size = self.tokens * width * whole.each
            view = self.tape.run(whole.value, size=size, view=True)
            parts.append(_Tensor(view, width, whole.each))
        return parts[0], parts[1], parts[2]

    def _mlp(self, x: _Tensor, linears: Sequence[Linear]) -> _Tensor:
        if not linears:
            return self._narrow(x)
        *projections, down = linears
        gate = self._activated(self._linear(x, projections[0])) if projections else x
        if len(projections) > 1:
            up = self._linear(x, projections[1])
            gate = self._run(gate, up, saves=(gate, up))
        elif projections and gate.width == 2 * down.inputs:  # gate and up in one
            half = gate.size / 2
            value = self.tape.run(gate.value, size=half, saves=(gate.value,))
            gate = _Tensor(value, gate.width / 2, gate.each)
        return self._sliced(self._linear(gate, down))

    def _activated(self, x: _Tensor) -> _Tensor:
        """One operation; or x (1 + tanh(c (x + a x³))) / 2 in several (Hendrycks & Gimpel 2016,
        arXiv:1606.08415)."""
        if self.style.activation == "one":
            return self._run(x, saves=(x,))
        wide = self._wide(x) if self.setting.wide_powers else x
        cubed = self._run(wide, saves=(wide,), scratch=2 * wide.size)
        inner = self._run(x, self._run(cubed), passes=(x,) if wide.each == x.each else ())
        bent = self._run(self._run(inner), saves_output=True)  # tanh
        half, one = self._run(x), self._run(bent, passes=(bent,))
        return self._run(half, one, saves=(half, one))

    # attention

    def _rotated(self, x: _Tensor) -> _Tensor:
        """x cos + rotated(x) sin, in the type of the stream (Su et al. 2021, arXiv:2104.09864)."""
        each = max(x.each, self.setting.stream)
        scratch = self.tokens * x.width * each if each != x.each else 0.0
        straight = self._run(x, each=each, scratch=scratch)
        turned = self._run(x, before=x.size / 2, scratch=2 * x.size)
        turned = self._run(turned, each=each, scratch=scratch)
        return self._run(straight, turned, passes=(straight, turned))

    def _mixed(self, query: _Tensor, key: _Tensor, value: _Tensor) -> _Tensor:
        """Attention: its kernel's memory grows with the positions (Dao et al. 2022,
        arXiv:2205.14135), and with their square under a mask, or where scores are kept."""
        s, setting = self.sizes, self.setting
        heads = s.heads / setting.tensor
        if setting.kernel == "eager":
            return self._eager(query, key, value)
        masked: complex = 0.0
        if setting.kernel == "masked":
            masked = self.tokens * setting.context * setting.length * setting.product
            if s.heads != s.kv_heads:
                key, value = self._repeated(key), self._repeated(value)
        query, key, value = (self._narrow(x) for x in (query, key, value))
        saves = [query.value, key.value, value.value]
        sums = Value(self.tokens * heads * 4, flows=False)
        saves.append(sums)
        if masked:
            saves.append(Value(masked, flows=False))
        size = self.tokens * heads * s.head_size * query.each
        out = self.tape.run(query.value, key.value, value.value, size=size, saves=saves, dear=True)
        self._save_output(out)
        mixed = _Tensor(out, heads * s.head_size, query.each)
        # Rostra's own kernels, and an exchange of positions, put the output in order once more
        again = setting.kernel in ("blocked", "ring") or setting.context > 1
        return self._run(mixed) if again else mixed

    def _eager(self, query: _Tensor, key: _Tensor, value: _Tensor) -> _Tensor:
        """Scores and probabilities of all pairs, the latter in float32 too."""
        s, setting = self.sizes, self.setting
        pairs = self.tokens * setting.length * s.heads / setting.tensor
        if s.heads != s.kv_heads:
            key, value = self._repeated(key), self._repeated(value)
        query, key, value = (self._narrow(x) for x in (query, key, value))
        size = pairs * query.each
        products = self.tape.run(query.value, key.value, size=size, saves=(query.value, key.value))
        scores = self.tape.run(products, size=size)
        wide = self.tape.run(scores, size=pairs * FLOAT, scratch=pairs * FLOAT)
        self._save_output(wide)
        weights = wide if query.each == FLOAT else self.tape.run(wide, size=size)
        saves = (weights, value.value)
        out = self.tape.run(weights, value.value, size=query.size, saves=saves, dear=True)
        return self._run(_Tensor(out, query.width, query.each))

    def _repeated(self, x: _Tensor) -> _Tensor:
        """Keys or values once for each head of queries."""
        width = self.sizes.heads * self.sizes.head_size / self.setting.tensor
        value = self.tape.run(x.value, size=self.tokens * width * x.each)
        return _Tensor(value, width, x.each)

    def _with_prefix(self, x: _Tensor) -> _Tensor:
        """Learned keys or values at the first positions (Li & Liang 2021, arXiv:2101.00190)."""
        table = Value(0.0, weight=True)
        found = self.tape.run(table, size=self.tokens * x.width * FLOAT)
        learned = self._cast(_Tensor(found, x.width, FLOAT), x.each)
        return self._run(x, learned)

    def _save_output(self, value: Value) -> None:
        """The last operation keeps its own result for the backward pass."""
        last = self.tape.steps[-1]
        if value.flows:
            self.tape.steps[-1] = replace(last, saves=(*last.saves, value))

    # norms

    def _norm(self, x: _Tensor) -> _Tensor:
        trains = self.setting.trains
        if self.style.norm == "layer":
            wide = self._wide(x)
            return self._run(wide, saves=(wide,))
        wide = self._wide(x)
        ones = wide.size / wide.width
        squared = self._run(wide, saves=(wide,), scratch=2 * wide.size)
        mean = self.tape.run(squared.value, size=ones)
        root = self.tape.run(mean, size=ones)
        self._save_output(root)
        scaled = self.tape.run(
            wide.value, root, size=wide.size, saves=(wide.value, root), scratch=wide.size
        )
        normed = _Tensor(scaled, wide.width, 4)
        if self.style.norm == "rms" and x.each != 4:
            normed = self._cast(normed, x.each)
        each = max(normed.each, 4 if self.setting.weight == 4 or self.setting.copies else x.each)
        saves = (normed,) if trains else ()
        result = self._run(normed, each=each, saves=saves, scratch=normed.size if trains else 0.0)
        if self.style.norm == "gemma" and x.each != 4:
            result = self._cast(result, x.each)
        return result

    # linears

    def _linear(self, x: _Tensor, linear: Linear) -> _Tensor:
        s = self.setting
        inputs, outputs = self._part(linear)
        numbers = inputs * outputs
        scaled = linear.name in s.adapted.names and s.adapted.kind == "ia3"
        if scaled and not any(part in linear.name for part in ATTENTION):
            x = self._cast(self._scaled(self._cast(x, FLOAT)), x.each)
        narrow = self._narrow(x)
        size = self.tokens * outputs * s.product
        if linear.name in s.quantized:
            weight = numbers * s.product
            out = self.tape.run(narrow.value, size=size, before=weight, scratch=weight, dear=True)
        else:
            parameter = Value(numbers * s.weight, s.trains, weight=True)
            taken = parameter
            if s.copies:
                taken = self.tape.run(parameter, size=numbers * 2, cast=s.keeps_copies)
            saves = [taken, *([narrow.value] if s.trains else [])]
            self.products += 1
            dear = not s.every_other or self.products % 2 == 1
            remade = (taken,) if s.recasts else ()
            out = self.tape.run(
                narrow.value, taken, size=size, saves=saves, dear=dear, remade=remade
            )
        made = _Tensor(out, outputs, s.product)
        if linear.name in s.adapted.names and s.adapted.kind == "lora":
            return self._lora(x, made, inputs, outputs)
        if scaled and any(part in linear.name for part in ATTENTION):
            return self._cast(self._scaled(made), made.each)
        return made

    def _scaled(self, x: _Tensor) -> _Tensor:
        """Times a learned vector (Liu et al. 2022, arXiv:2205.05638)."""
        vector = Value(x.width * FLOAT, weight=True)
        size = self.tokens * x.width * FLOAT
        scaled = self.tape.run(x.value, vector, size=size, saves=(x.value,), scratch=2 * size)
        return _Tensor(scaled, x.width, FLOAT)

    def _lora(self, x: _Tensor, base: _Tensor, inputs: float, outputs: float) -> _Tensor:
        """base + scale B A x (Hu et al. 2021, arXiv:2106.09685)."""
        rank = self.setting.adapted.rank
        low = self._trained(x, inputs, rank)
        high = self._trained(low, rank, outputs)
        scaled = self._run(high)
        return self._run(base, scaled, passes=(base, scaled))

    def _trained(self, x: _Tensor, inputs: float, outputs: float) -> _Tensor:
        """A product with a matrix of an adapter."""
        s = self.setting
        narrow = self._narrow(x)
        parameter = Value(inputs * outputs * 4, weight=True)
        taken = parameter
        if s.product != 4:
            taken = self.tape.run(parameter, size=inputs * outputs * 2, cast=True)
        size = self.tokens * outputs * s.product
        saves = (narrow.value, taken)
        out = self.tape.run(narrow.value, taken, size=size, saves=saves, dear=True)
        return _Tensor(out, outputs, s.product)

    def _part(self, linear: Linear) -> tuple[float, float]:
        n = self.setting.tensor
        if linear.cut == "columns":
            return linear.inputs, linear.outputs / n
        if linear.cut == "rows":
            return linear.inputs / n, linear.outputs
        return linear.inputs, linear.outputs

    # small operations

    def _run(
        self,
        *inputs: _Tensor,
        each: int | None = None,
        saves: Sequence[_Tensor] = (),
        passes: Sequence[_Tensor] = (),
        scratch: complex = 0.0,
        before: complex = 0.0,
        saves_output: bool = False,
    ) -> _Tensor:
        """An operation number by number."""
        first = inputs[0]
        each = each or max(x.each for x in inputs)
        value = self.tape.run(
            *(x.value for x in inputs),
            size=first.size / first.each * each,
            saves=[x.value for x in saves],
            passes=[x.value for x in passes],
            scratch=scratch,
            before=before,
        )
        if saves_output:
            self._save_output(value)
        return _Tensor(value, first.width, each)

    def _cast(self, x: _Tensor, each: int) -> _Tensor:
        return x if x.each == each else self._run(x, each=each)

    def _wide(self, x: _Tensor) -> _Tensor:
        return self._cast(x, 4)

    def _narrow(self, x: _Tensor) -> _Tensor:
        return self._cast(x, self.setting.product)

    def _add(self, residual: _Tensor, x: _Tensor) -> _Tensor:
        each = max(residual.each, x.each)
        passes = [y for y in (residual, x) if y.each == each]
        return self._run(residual, x, each=each, passes=passes)

    def _gathered(self, x: _Tensor) -> _Tensor:
        """All positions, of those between blocks that tensor ranks share."""
        n = self.setting.tensor
        if n == 1:
            return x
        x = self._narrow(x)
        size = self.tokens * x.width * x.each  # ranks' parts are put in order once more
        value = self.tape.run(x.value, size=size, before=size, scratch=size)
        return _Tensor(value, x.width, x.each)

    def _sliced(self, x: _Tensor) -> _Tensor:
        n = self.setting.tensor
        if n == 1:
            return x
        value = self.tape.run(x.value, size=x.size / n, before=x.size, scratch=x.size, dear=True)
        return _Tensor(value, x.width, x.each)
