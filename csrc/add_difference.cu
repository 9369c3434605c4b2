// add_difference on a GPU.
#include "lloyd_max_codes.cuh"

namespace megatron_zpp::cuda {

namespace {

template <int BITS>
struct AddDifferenceParams {
  float* reference;
  uint32_t blocks;  // of all messages
  Messages<BITS> messages;
};

template <int BITS, typename S>
__global__ void __launch_bounds__(kThreads) add_difference_kernel(
    const __grid_constant__ AddDifferenceParams<BITS> p) {
  constexpr uint32_t kTile = S::kGroups * S::kAtOnce;
  const float level = level_of_lane<BITS>();
  for (uint32_t first = warp_index() * kTile; first < p.blocks; first += warp_count() * kTile) {
    Eight<float, true> reference[S::kAtOnce][S::kRuns];
    uint32_t codes[S::kAtOnce][S::kRuns], scales[S::kAtOnce];
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = min(first + b * S::kGroups + S::group(), p.blocks - 1);
      const Quotient message = p.messages.by_blocks(block);
      const Message<BITS> from = p.messages[message.quotient];
      scales[b] = *from.scale(message.remainder);
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        codes[b][v] = from.load_run(S::run_of_message(message.remainder, v));
        reference[b][v].load(p.reference + uint64_t(block) * S::kBlock + S::run(v));
      }
    }
#pragma unroll
    for (int b = 0; b < S::kAtOnce; ++b) {
      const uint32_t block = first + b * S::kGroups + S::group();
      const float scale = float_of(scales[b] << 16);
      const bool moves = block < p.blocks && (scales[b] & 0x7FFFu) != 0;
#pragma unroll
      for (int v = 0; v < S::kRuns; ++v) {
        float r[8];
        reference[b][v].to_floats(r);
#pragma unroll
        for (int i = 0; i < 8; ++i) r[i] += level_of<BITS>(level, Message<BITS>::code(codes[b][v], i)) * scale;
        store_eight<true>(p.reference + uint64_t(block) * S::kBlock + S::run(v), r, moves);
      }
    }
  }
}

}  // namespace

void run(const AddDifference& op, CUstream_st* stream) {
  with_shape(op.format, [&](auto bits, auto shape) {
    constexpr int kBits = decltype(bits)::value;
    using S = decltype(shape);
    const uint32_t blocks = index_of(op.message_count * op.elements / op.format.block);
    const AddDifferenceParams<kBits> params{op.reference, blocks,
                                            Messages<kBits>(op.messages, op.format, op.elements)};
    launch<add_difference_kernel<kBits, S>>(tiles_of<S>(blocks), stream, params);
  });
}

}  // namespace megatron_zpp::cuda
