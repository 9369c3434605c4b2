// sum_quantize with feedback of the error on a GPU.
#include "sum_quantize.cuh"

namespace megatron_zpp::cuda {

namespace {

// Runs of eight elements, as they suit the memory accesses of the error.
template <Codes In, Codes Out, typename T, int K>
__device__ __forceinline__ void sum_with_error(const SumQuantizeParams& p, const Target& target) {
  const uint64_t index = first_element(p, target);
  RunSum<In, 8, K> sum;
  begin_sum(p, target, sum);
  T* error = static_cast<T*>(p.error) + index;
  Eight<T, true> loaded[K];
#pragma unroll
  for (int k = 0; k < K; ++k) loaded[k].load(error + p.lanes.run<8>(k));
  float x[K][8];
  sum.finish(p.addends, x);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    float eight[8];
    loaded[k].to_floats(eight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[k][i] += eight[i];
  }
  const auto keep_lost = [&](int k, const auto& words, const BlockScale& scale) {
    float lost[8];
    decode_codes<Out>(words, lost);
#pragma unroll
    for (int i = 0; i < 8; ++i) lost[i] = lost_of(x[k][i], lost[i] * scale.stored);
    const bool finite = bits_of(scale.stored) != kNanBits;  // else a NaN would live on
    store_eight<true>(error + p.lanes.run<8>(k), lost, target.active && finite);
  };
  const Quotient place = p.by_message_blocks(target.block);
  write_block<Out>(p.writer, p.lanes, p.writer.message(place.quotient), place.remainder, index, x, target.active,
                   keep_lost);
}

template <Codes In, Codes Out, int K>
__global__ void __launch_bounds__(kThreads, K == 8 ? 1 : 2)
    sum_quantize_error_kernel(const __grid_constant__ SumQuantizeParams p) {
  const uint32_t groups = p.lanes.groups();
  for (uint32_t first = warp_index() * groups; first < p.blocks; first += warp_count() * groups) {
    const Target target = target_of(p, first);
    if (p.error_type == Type::fp32)
      sum_with_error<In, Out, float, K>(p, target);
    else if (p.error_type == Type::bf16)
      sum_with_error<In, Out, Bf16, K>(p, target);
    else
      sum_with_error<In, Out, Fp16, K>(p, target);
  }
}

template <Codes In, Codes Out>
void launch_codes(const SumQuantize& op, CUstream_st* stream) {
  const int block = op.output_format.block;
  switch (vectors_a_lane(block)) {
    case 1: return launch_blocks<sum_quantize_error_kernel<In, Out, 1>>(op, 8, stream);
    case 4: return launch_blocks<sum_quantize_error_kernel<In, Out, 4>>(op, 32, stream);
    case 8: return launch_blocks<sum_quantize_error_kernel<In, Out, 8>>(op, 64, stream);
  }
  throw std::invalid_argument("sum_quantize: no kernel for blocks of " + std::to_string(block));
}

}  // namespace

void run_with_error(const SumQuantize& op, CUstream_st* stream) {
  with_codes(op.format.codes, [&](auto in) {
    with_codes(op.output_format.codes,
               [&](auto out) { launch_codes<decltype(in)::value, decltype(out)::value>(op, stream); });
  });
}

}  // namespace megatron_zpp::cuda
