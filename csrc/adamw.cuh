// One step of AdamW on quads: four neighbouring elements per thread.
#pragma once

#include "device.cuh"

namespace megatron_zpp::cuda {

// Every thread computes these from the scalars in device memory.
__device__ __forceinline__ AdamwFactors load_factors(const AdamwStep& op) {
  return adamw_factors(op.scalars.constants, *op.scalars.divisor, op.scalars.bias_corrections);
}

// Four gradients as fp32.
template <typename G, bool ALIGNED>
__device__ __forceinline__ float4 load_gradients(const AdamwStep& op, int64_t at) {
  const G* source = static_cast<const G*>(op.gradient) + at;
  if constexpr (std::is_same_v<G, float>) {
    return load_quad<ALIGNED>(source);
  } else if constexpr (ALIGNED) {
    const uint2 words = load_vector<uint2>(source);
    return {to_float(G{uint16_t(words.x)}), to_float(G{uint16_t(words.x >> 16)}), to_float(G{uint16_t(words.y)}),
            to_float(G{uint16_t(words.y >> 16)})};
  } else {
    return {to_float(source[0]), to_float(source[1]), to_float(source[2]), to_float(source[3])};
  }
}

// The states and gradients of a quad in registers.
template <typename G, bool ALIGNED>
struct AdamwQuad {
  float4 weight, gradient, average, average_square;

  __device__ __forceinline__ void load(const AdamwStep& op, int64_t at) {
    weight = load_quad<ALIGNED>(op.master + at);
    gradient = load_gradients<G, ALIGNED>(op, at);
    average = load_quad<ALIGNED>(op.exp_avg + at);
    average_square = load_quad<ALIGNED>(op.exp_avg_sq + at);
  }

  __device__ __forceinline__ void step(const AdamwStep& op, const AdamwFactors& factors, int64_t at) {
    step_one(op, factors, at, weight.x, gradient.x, average.x, average_square.x);
    step_one(op, factors, at + 1, weight.y, gradient.y, average.y, average_square.y);
    step_one(op, factors, at + 2, weight.z, gradient.z, average.z, average_square.z);
    step_one(op, factors, at + 3, weight.w, gradient.w, average.w, average_square.w);
  }

  __device__ __forceinline__ void store(const AdamwStep& op, int64_t at) const {
    store_quad<ALIGNED>(op.master + at, weight);
    store_quad<ALIGNED>(op.exp_avg + at, average);
    store_quad<ALIGNED>(op.exp_avg_sq + at, average_square);
  }

 private:
  __device__ __forceinline__ static void step_one(const AdamwStep& op, const AdamwFactors& factors, int64_t at,
                                                  float& weight, float gradient, float& average,
                                                  float& average_square) {
    const AdamwState after =
        adamw_step({weight, average, average_square}, gradient, at < op.decayed, op.scalars.constants, factors);
    weight = after.weight;
    average = after.average;
    average_square = after.average_square;
  }
};

// Whether every quad can be loaded and stored at once.
inline bool is_aligned(const AdamwStep& op) {
  const int gradient_bytes = op.gradient_dtype == DType::fp32 ? 16 : 8;
  return is_aligned(op.master, 16) && is_aligned(op.gradient, gradient_bytes) && is_aligned(op.exp_avg, 16) &&
         is_aligned(op.exp_avg_sq, 16);
}

}  // namespace megatron_zpp::cuda
