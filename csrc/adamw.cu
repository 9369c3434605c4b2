// adamw on a GPU.
#include "adamw.cuh"

namespace megatron_zpp::cuda {

namespace {

__device__ __forceinline__ uint32_t narrow_bits(float x, DType dtype) {
  return dtype == DType::bf16 ? narrow<Bf16>(x).bits : narrow<Fp16>(x).bits;
}

template <bool ALIGNED>
__device__ __forceinline__ void write_gather_source(const Adamw& op, int64_t at, const float4& weight) {
  const uint32_t x = narrow_bits(weight.x, op.gather_source_dtype), y = narrow_bits(weight.y, op.gather_source_dtype);
  const uint32_t z = narrow_bits(weight.z, op.gather_source_dtype), w = narrow_bits(weight.w, op.gather_source_dtype);
  uint16_t* target = static_cast<uint16_t*>(op.gather_source) + at;
  if constexpr (ALIGNED) {
    *reinterpret_cast<uint2*>(target) = {x | y << 16, z | w << 16};
  } else {
    target[0] = uint16_t(x);
    target[1] = uint16_t(y);
    target[2] = uint16_t(z);
    target[3] = uint16_t(w);
  }
}

// Steps the elements after the last whole quad.
template <typename G>
__device__ __forceinline__ void step_rest(const Adamw& op, const AdamwFactors& factors, int64_t at) {
  for (; at < op.step.elements; ++at) {
    const AdamwState before = {op.step.master[at], op.step.exp_avg[at], op.step.exp_avg_sq[at]};
    const float gradient = to_float(static_cast<const G*>(op.step.gradient)[at]);
    const AdamwState after = adamw_step(before, gradient, at < op.step.decayed, op.step.scalars.constants, factors);
    op.step.master[at] = after.weight;
    op.step.exp_avg[at] = after.average;
    op.step.exp_avg_sq[at] = after.average_square;
    if (op.gather_source != nullptr)
      static_cast<uint16_t*>(op.gather_source)[at] = uint16_t(narrow_bits(after.weight, op.gather_source_dtype));
  }
}

template <typename G, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Adamw op) {
  if (*op.step.scalars.found_inf != 0) return;
  const AdamwFactors factors = load_factors(op.step);
  const int64_t step = int64_t(gridDim.x) * kThreads * 4;
  for (int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4; at < op.step.elements; at += step) {
    if (at + 4 > op.step.elements) return step_rest<G>(op, factors, at);
    AdamwQuad<G, ALIGNED> quad;
    quad.load(op.step, at);
    quad.step(op.step, factors, at);
    quad.store(op.step, at);
    if (op.gather_source != nullptr) write_gather_source<ALIGNED>(op, at, quad.weight);
  }
}

}  // namespace

void run(const Adamw& op, CUstream_st* stream) {
  const int64_t tiles = (op.step.elements + 4 * kWarp - 1) / (4 * kWarp);
  with_dtype(op.step.gradient_dtype, [&](auto dtype) {
    using G = typename decltype(dtype)::type;
    if (is_aligned(op.step) && is_aligned(op.gather_source, 8))
      launch<adamw_kernel<G, true>>(tiles, stream, op, kGridsForAll);
    else
      launch<adamw_kernel<G, false>>(tiles, stream, op, kGridsForAll);
  });
}

}  // namespace megatron_zpp::cuda
