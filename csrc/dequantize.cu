// dequantize on a GPU.
#include "codes.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kElements = 32;             // per lane and iteration
constexpr int kTile = kElements * kWarp;  // per warp and iteration

struct DequantizeParams {
  Reader reader;
  MessageOrder position_of;
  void* output;
  int64_t row_stride;
  uint32_t blocks;  // in all rows
  bool rotate;
};

// Neighbouring lanes hold neighbouring runs of RUN elements; the runs of two or four lanes are rotated together.
template <CodeType C, typename T, int RUN, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 4) dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  constexpr int kRuns = kElements / RUN;
  const int log_block = p.reader.log_block;
  const uint32_t in_block = (1u << log_block) - 1;
  for (uint64_t tile = warp_index();; tile += warp_count()) {
    const uint32_t first = uint32_t(tile * kTile >> log_block);
    if (first >= p.blocks) break;
    uint32_t words[kRuns][words_of<C>(RUN)];
    uint32_t scale_words[kRuns], selectors[kRuns];
    T* target[kRuns];
    bool active[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t element = (uint32_t(tile * kTile) & in_block) + RUN * (r * kWarp + lane_index());
      const uint32_t block = first + (element >> log_block), start = element & in_block;
      active[r] = block < p.blocks;
      const BlockPosition position = p.position_of(min(block, p.blocks - 1));  // past the end: the last block again
      const uint8_t* message = p.reader.message(position.message);
      const uint64_t at = (uint64_t(position.block) << log_block) + start;
      load_words(p.reader.codes_at<C>(message, at), words[r]);
      scale_words[r] = load_scale_word(p.reader.scale_word_at(message, at));
      selectors[r] = p.reader.scale_selector(at);
      target[r] = static_cast<T*>(p.output) + position.row * p.row_stride +
                  (int64_t(position.column_block) << log_block) + start;
    }
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      float x[RUN];
      decode_codes<C>(words[r], x);
      const float scale = scale_of_word(scale_words[r], selectors[r]);
#pragma unroll
      for (int i = 0; i < RUN; ++i) x[i] *= scale;
      if (p.rotate) rotate(x);
#pragma unroll
      for (int i = 0; i < RUN; i += 8) {
        float eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = x[i + j];
        store_eight<ALIGNED>(target[r] + i, eight, active[r]);
      }
    }
  }
}

template <CodeType C, typename T, int RUN>
void launch_tiles(const Dequantize& op, CUstream_st* stream) {
  const int64_t row_blocks = op.columns / op.format.block;
  const DequantizeParams params{
      Reader(op.messages, op.format, op.rows / op.message_count * op.columns),
      MessageOrder(row_blocks, op.rows / op.message_count),
      op.output,
      op.row_stride,
      index_of(op.rows * row_blocks),
      op.format.rotate,
  };
  const int64_t tiles = (op.rows * op.columns + kTile - 1) / kTile;
  if (is_aligned(op.output, 16) && (op.rows == 1 || op.row_stride * sizeof(T) % 16 == 0))
    launch<dequantize_kernel<C, T, RUN, true>>(tiles, stream, params, kGridsForAll);
  else
    launch<dequantize_kernel<C, T, RUN, false>>(tiles, stream, params, kGridsForAll);
}

// Longer runs need fewer shuffles to rotate, but fp32 needs runs of eight, which neighbouring lanes store together.
template <CodeType C, typename T>
void launch_runs(const Dequantize& op, CUstream_st* stream) {
  if constexpr (sizeof(T) == 2) {
    if (op.format.rotate) return launch_tiles<C, T, 16>(op, stream);
  }
  launch_tiles<C, T, 8>(op, stream);
}

}  // namespace

void run(const Dequantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    with_dtype(op.output_dtype, [&](auto dtype) {
      launch_runs<decltype(code_type)::value, typename decltype(dtype)::type>(op, stream);
    });
  });
}

}  // namespace megatron_zpp::cuda
