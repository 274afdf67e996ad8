"""Counts from the text of a compiled program and from the report of ptxas."""

import jax
import jax.numpy as jnp

from mercury_jax import sharding
from mercury_jax.bench import hlo


def test_a_program_compiled_for_a_cpu_is_counted():
    """A loop of unknown length is counted once, one of 5 steps five times; collectives by kind and bytes."""
    on = sharding.mesh(data=1, tensor=4)
    lies = lambda *axes: jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*axes))

    def program(x, w):
        layer = lambda x, w: (jnp.tanh(x @ w @ w.T), None)
        step = lambda loop: (loop[0] + 1, jax.lax.scan(layer, loop[1], w)[0])
        return jax.lax.while_loop(lambda loop: (loop[0] < 99) & (loop[1].sum() < 7), step, (0, x))[1]

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=lies())
    w = jax.ShapeDtypeStruct((5, 32, 64), jnp.float32, sharding=lies(None, None, "tensor"))
    module = hlo.parse(jax.jit(program).lower(x, w).compile().as_text())
    assert hlo.products(module) == 5 * 2 * (2 * 16 * 32 * 64) / 4
    assert hlo.collectives(module)["all-reduce"] == {
        "count": 5, "bytes": 5 * 16 * 32 * 4, "per_pass": 5, "in_layers": 0,
    }  # fmt: skip


def test_each_sum_of_a_shard_map_is_counted():
    """They all have the same channel."""

    def program(x):
        for _ in range(3):
            x = jnp.tanh(jax.lax.psum(x, "tensor"))
        return x

    P, on = jax.sharding.PartitionSpec, sharding.mesh(data=1, tensor=4)
    spread = jax.shard_map(program, mesh=on, in_specs=P("tensor"), out_specs=P(), check_vma=False)
    module = hlo.parse(jax.jit(spread).lower(jnp.ones((16, 32))).compile().as_text())
    assert hlo.collectives(module)["all-reduce"]["count"] == 3


TEXT = """HloModule jit_f, is_scheduled=true

%fused (a: bf16[4,8], b: bf16[8,16]) -> bf16[4,16] {
  %a = bf16[4,8]{1,0} parameter(0)
  %b = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (c: f32[64,1024], d: f32[1,1024], i: s32[]) -> f32[64,1024] {
  %c = f32[64,1024]{1,0} parameter(0)
  %d = f32[1,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %u = f32[64,1024]{1,0} dynamic-update-slice(%c, %d, %i, %i)
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %ar = (bf16[4,8]{1,0}, f32[2]{0}) all-reduce(%x, %f), channel_id=3, to_apply=%add
  %again = bf16[16,8]{1,0} all-gather(%x), channel_id=4, dimensions={0}
  %ags = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), channel_id=4, dimensions={0}
  %agd = bf16[16,8]{1,0} all-gather-done(%ags)
  %f = f32[2]{0} constant({1, 2})
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%n, %x)
}

ENTRY %main (x: bf16[4,8], y: bf16[8,16]) -> bf16[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,16]{1,0} parameter(1)
  %z = f32[64,1024]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config={m = "calls=%body, {"}
  %cache = f32[64,1024]{1,0} fusion(%z, %z, %z), kind=kLoop, calls=%put
  %g = (bf16[4,16]{1,0}, s8[512]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config=GEMM
  %w = (s32[], bf16[4,8]{1,0}) while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %fusion = bf16[4,16]{1,0} fusion(%x, %y), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/block_3/dot"}
}
""".replace("GEMM", '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}')


def test_counts_of_a_text_agree_with_those_made_by_hand():
    module = hlo.parse(TEXT)
    assert module.entry == "main" and hlo.products(module) == 2 * (2 * 4 * 16 * 8)
    assert hlo.collectives(module) == {
        "all-reduce": {"count": 7, "bytes": 7 * (64 + 8), "per_pass": 0, "in_layers": 0},
        "all-gather": {"count": 7, "bytes": 7 * 256, "per_pass": 0, "in_layers": 0},
    }
    assert hlo.calls(module) == {"mosaic_gpu_v2": 1, "__cublas$gemm": 1}
    big = hlo.largest(module)
    assert big[0]["shape"] == "f32[64,1024]" and big[0]["op"] == "custom-call" and big[0]["count"] == 1
    assert {
        "shape": "bf16[4,16]", "bytes": 128, "count": 1, "op": "fusion", "of": "jit(f)/block_*/dot",
    } in big  # fmt: skip


TPU = """HloModule jit_f, is_scheduled=true

%body (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %k.1 = bf16[4,8]{1,0:T(8,128)(2,1)} custom-call(%p), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/while/body/canvas_attention/pallas_call" stack_frame_id=3}, backend_config={"custom_call_config":{"body":"TUzv="},"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"999"}],"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
  ROOT %k.2 = bf16[4,8]{1,0:T(8,128)(2,1)} custom-call(%k.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/canvas_attention/pallas_call"}, backend_config={"used_scoped_memory_configs":[{"memory_space":"2","offset":"0","size":"7"},{"memory_space":"1","offset":"0","size":"8192"}]}
}

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[4,8]{1,0} while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %ragged-dot-none.12 = bf16[4,8]{1,0} custom-call(%w), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/ragged_dot"}, backend_config={"used_scoped_memory_configs":[]}
}
"""  # noqa: E501


def test_kernels_of_a_tpu_have_their_names_and_their_memory():
    assert hlo.tpu_kernels(hlo.parse(TPU)) == [
        {"name": "canvas_attention", "count": 14, "vmem_bytes": 8192},
        {"name": "ragged-dot-none", "count": 1, "vmem_bytes": 0},
    ]


PTXAS = """.visible .entry canvas_mosaic_gpu_kernel(
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
  %4 = call ptr @mosaic_gpu_get_function(ptr %3, ptr @canvas_mosaic_gpu_kernel_name, i32 165976, i32 1)
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'canvas_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for canvas_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""


def test_a_kernel_has_its_registers_and_spills():
    first, second = hlo.gpu_kernels(PTXAS)
    assert first == {"name": "canvas_mosaic_gpu_kernel", "arch": "sm_90a", "registers": 168, "spill_bytes": 12,
                     "stack_bytes": 16, "shared_bytes": 1024 + 165976, "products": {"wgmma.mma_async": 2}}  # fmt: skip
    assert second["registers"] == 40 and second["spill_bytes"] == 0 and not second["products"]
