// adamw on a GPU.
#include "adamw.cuh"

namespace megatron_zpp::cuda {

namespace {

__device__ __forceinline__ uint32_t published_bits(float x, Type type) {
  return type == Type::bf16 ? narrow<Bf16>(x).bits : narrow<Fp16>(x).bits;
}

template <bool ALIGNED>
__device__ __forceinline__ void publish(const AdamwPublish& op, int64_t at, const float4& weight) {
  const uint32_t x = published_bits(weight.x, op.published_type), y = published_bits(weight.y, op.published_type);
  const uint32_t z = published_bits(weight.z, op.published_type), w = published_bits(weight.w, op.published_type);
  uint16_t* target = static_cast<uint16_t*>(op.published) + at;
  if constexpr (ALIGNED) {
    *reinterpret_cast<uint2*>(target) = {x | y << 16, z | w << 16};
  } else {
    target[0] = uint16_t(x);
    target[1] = uint16_t(y);
    target[2] = uint16_t(z);
    target[3] = uint16_t(w);
  }
}

// The elements behind the last whole quad.
template <typename G>
__device__ __forceinline__ void step_rest(const AdamwPublish& op, const AdamwScalars& scalars, int64_t at) {
  for (; at < op.step.elements; ++at) {
    const AdamwState before = {op.step.master[at], op.step.exp_avg[at], op.step.exp_avg_sq[at]};
    const float gradient = to_float(static_cast<const G*>(op.step.gradient)[at]);
    const AdamwState after = adamw_step(before, gradient, at < op.step.decayed, op.step.constants, scalars);
    op.step.master[at] = after.weight;
    op.step.exp_avg[at] = after.average;
    op.step.exp_avg_sq[at] = after.average_square;
    if (op.published != nullptr)
      static_cast<uint16_t*>(op.published)[at] = uint16_t(published_bits(after.weight, op.published_type));
  }
}

template <typename G, bool ALIGNED>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ AdamwPublish op) {
  if (*op.step.found_inf != 0) return;
  const AdamwScalars scalars = load_scalars(op.step);
  const int64_t step = int64_t(gridDim.x) * kThreads * 4;
  for (int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4; at < op.step.elements; at += step) {
    if (at + 4 > op.step.elements) return step_rest<G>(op, scalars, at);
    AdamwQuad<G, ALIGNED> quad;
    quad.load(op.step, at);
    quad.step(op.step, scalars, at);
    quad.store(op.step, at);
    if (op.published != nullptr) publish<ALIGNED>(op, at, quad.weight);
  }
}

}  // namespace

void run(const AdamwPublish& op, CUstream_st* stream) {
  const int64_t tiles = (op.step.elements + 4 * kWarp - 1) / (4 * kWarp);
  with_type(op.step.gradient_type, [&](auto type) {
    using G = typename decltype(type)::type;
    if (is_aligned(op.step) && is_aligned(op.published, 8))
      launch<adamw_kernel<G, true>>(tiles, stream, op, kGridsForAll);
    else
      launch<adamw_kernel<G, false>>(tiles, stream, op, kGridsForAll);
  });
}

}  // namespace megatron_zpp::cuda
