"""Kernels and bytes of a pass, from the text of a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from mercury_jax.bench import hlo, traffic

KNOWN = '{"known_trip_count":{"n":"7"}}'
TEXT = """HloModule jit_f, is_scheduled=true

%part (table: bf16[1000,64], i: s32[]) -> f32[10,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %flat = bf16[1000,64]{1,0} bitcast(%table)
  %rows = bf16[10,64]{1,0} dynamic-slice(%flat, %i, %i), dynamic_slice_sizes={10,64}
  ROOT %wide = f32[10,64]{1,0} convert(%rows)
}

%put (c: f32[64,1024], d: f32[1,1024], j: s32[]) -> f32[64,1024] {
  %c = f32[64,1024]{1,0} parameter(0)
  %d = f32[1,1024]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %u = f32[64,1024]{1,0} dynamic-update-slice(%c, %d, %j, %j)
}

%little (l: f32[64,1024]) -> f32[64,1024] {
  %l = f32[64,1024]{1,0} parameter(0)
  ROOT %nothing = f32[64,1024]{1,0} copy(%l)
}

%much (m: f32[64,1024]) -> f32[64,1024] {
  %m = f32[64,1024]{1,0} parameter(0)
  %once = f32[64,1024]{1,0} copy(%m)
  ROOT %twice = f32[64,1024]{1,0} copy(%once)
}

%layer (q: f32[64,1024]) -> f32[64,1024] {
  %q = f32[64,1024]{1,0} parameter(0)
  ROOT %call = f32[64,1024]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
}

%more (q2: f32[64,1024]) -> pred[] {
  %q2 = f32[64,1024]{1,0} parameter(0)
  ROOT %known = pred[] constant(true)
}

%step (p: (bf16[1000,64], f32[64,1024])) -> (bf16[1000,64], f32[64,1024]) {
  %p = (bf16[1000,64]{1,0}, f32[64,1024]{1,0}) parameter(0)
  %t = bf16[1000,64]{1,0} get-tuple-element(%p), index=0
  %cache = f32[64,1024]{1,0} get-tuple-element(%p), index=1
  %n = s32[] constant(3)
  %row = f32[1,1024]{1,0} constant({...})
  %read = f32[10,64]{1,0} fusion(%t, %n), kind=kLoop, calls=%part
  %write = f32[64,1024]{1,0} fusion(%cache, %row, %n), kind=kLoop, calls=%put
  %branch = f32[64,1024]{1,0} conditional(%n, %write, %write), branch_computations={%little, %much}
  %layers = f32[64,1024]{1,0} while(%branch), condition=%more, body=%layer, config={"known_trip_count":{"n":"7"}}
  ROOT %out = (bf16[1000,64]{1,0}, f32[64,1024]{1,0}) tuple(%t, %layers)
}

ENTRY %main (x: (bf16[1000,64], f32[64,1024])) -> (bf16[1000,64], f32[64,1024]) {
  %x = (bf16[1000,64]{1,0}, f32[64,1024]{1,0}) parameter(0)
  ROOT %w = (bf16[1000,64]{1,0}, f32[64,1024]{1,0}) while(%x), condition=%more, body=%step
}
"""


def test_a_pass_counts_slices_updates_in_place_one_branch_and_known_loops():
    cost = traffic.pass_cost(hlo.parse(TEXT))
    whole = 64 * 1024 * 4
    part = (10 * 64 * 2 + 4, 10 * 64 * 4)  # rows of the table and the index; the converted rows
    put = (1024 * 4 + 4, 1024 * 4)  # the new row and the index; the row in place
    assert cost is not None and cost.kernels == cost.small == 1 + 1 + 2 + 7
    assert (
        cost.read == part[0] + put[0] + (2 + 7) * whole and cost.written == part[1] + put[1] + (2 + 7) * whole
    )
    assert cost.open_loops == 0
    unknown = traffic.pass_cost(hlo.parse(TEXT.replace(KNOWN, "")))
    assert unknown is not None and unknown.open_loops == 1 and unknown.kernels == cost.kernels - 6
    again = traffic.implied(cost, bandwidth=1e9, tokens=17)
    assert again["seconds"] == pytest.approx(cost.bytes / 1e9 + 11 * traffic.LAUNCH)
    assert again["tokens_per_second"] == pytest.approx(1 / again["seconds"])


def test_a_compiled_loop_reads_its_weights_once_a_pass():
    def run(x, w):
        return jax.lax.while_loop(lambda s: s.sum() < 7, lambda s: jnp.tanh(s @ w), x)

    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.jit(run).lower(like(8, 512), like(512, 512)).compile().as_text()
    cost = traffic.pass_cost(hlo.parse(program))
    assert cost is not None and 4 * 512 * 512 <= cost.read <= 1.2 * 4 * 512 * 512
    one_pass = jax.jit(lambda x: x + 1).lower(like(8)).compile().as_text()
    assert traffic.pass_cost(hlo.parse(one_pass)) is None
