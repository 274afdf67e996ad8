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
    unknown_text = TEXT.replace(KNOWN, "")
    moe = unknown_text.replace(
        "body=%layer", 'body=%layer, metadata={op_name="jit(f)/while/body/block_1/moe/expert_tiles/while"}'
    )
    of_experts = traffic.pass_cost(hlo.parse(moe), experts=7)
    assert of_experts == cost and traffic.pass_cost(hlo.parse(unknown_text), experts=7) == unknown
    in_place = TEXT.replace('"mosaic_gpu_v2"', '"mosaic_gpu_v2", output_to_operand_aliasing={{}: (0, {})}')
    kernel = traffic.pass_cost(hlo.parse(in_place))  # seven of them, which read nothing else
    assert kernel is not None
    assert kernel == cost._replace(read=cost.read - 7 * whole, written=cost.written - 7 * whole)
    again = traffic.implied(cost, bandwidth=1e9, tokens=17)
    assert again["seconds"] == pytest.approx(cost.bytes / 1e9 + 11 * traffic.LAUNCH)
    assert again["tokens_per_second"] == pytest.approx(1 / again["seconds"])
    slow = traffic.implied(
        cost, bandwidth=1e9, tokens=17, compute=2.0
    )  # products take longer than the memory
    assert slow["seconds"] == pytest.approx(2.0 + slow["launch_seconds"]) and slow["compute_seconds"] == 2.0


def test_the_experts_of_a_pass_are_those_that_uniform_routing_chooses():
    assert traffic.chosen_experts(128, 8, 1) == 8 and traffic.chosen_experts(128, 8, 10_000) == 128
    picked = jax.random.randint(jax.random.key(0), (500, 32), 0, 256)  # one expert for each of 32 tokens
    seen = jnp.mean(jax.vmap(lambda row: (jnp.bincount(row, length=256) > 0).sum())(picked))
    assert traffic.chosen_experts(256, 1, 32) == pytest.approx(float(seen), abs=1)


FUSED = """
%scaled (logits: f32[8,4096], s: f32[], j: s32[]) -> f32[8,16] {
  %logits = f32[8,4096]{1,0} parameter(0)
  %s = f32[] parameter(1)
  %j = s32[] parameter(2)
  %wide = f32[8,4096]{1,0} broadcast(%s), dimensions={}
  %times = f32[8,4096]{1,0} multiply(%logits, %wide)
  %narrow = bf16[8,4096]{1,0} convert(%times)
  ROOT %found = bf16[8,16]{1,0} dynamic-slice(%narrow, %j, %j), dynamic_slice_sizes={8,16}
}

ENTRY %main (a: f32[8,4096], b: f32[], c: s32[]) -> f32[8,16] {
  %a = f32[8,4096]{1,0} parameter(0)
  %b = f32[] parameter(1)
  %c = s32[] parameter(2)
  ROOT %fused = f32[8,16]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%scaled
}
"""


def cost_of_the_fusion(text):
    module = hlo.parse(text)
    among = module.computations[module.entry]
    return traffic.instruction_cost(module, among, among["fused"])


def test_a_fused_slice_of_computed_values_reads_what_they_are_computed_from():
    cost = cost_of_the_fusion(FUSED)
    assert (cost.kernels, cost.read, cost.written) == (1, 8 * 16 * 4 + 4 + 4, 8 * 16 * 2)
    whole = FUSED.replace(
        "ROOT %found = bf16[8,16]{1,0} dynamic-slice(%narrow, %j, %j)",
        "ROOT %found = bf16[8,4096]{1,0} copy(%narrow)",
    )
    assert 8 * 4096 * 4 <= cost_of_the_fusion(whole).read <= 8 * 4096 * 4 + 8


def test_a_compiled_loop_reads_its_weights_once_a_pass():
    def run(x, w):
        return jax.lax.while_loop(lambda s: s.sum() < 7, lambda s: jnp.tanh(s @ w), x)

    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.jit(run).lower(like(8, 512), like(512, 512)).compile().as_text()
    cost = traffic.pass_cost(hlo.parse(program))
    assert cost is not None and 4 * 512 * 512 <= cost.read <= 1.2 * 4 * 512 * 512
    one_pass = jax.jit(lambda x: x + 1).lower(like(8)).compile().as_text()
    assert traffic.pass_cost(hlo.parse(one_pass)) is None
