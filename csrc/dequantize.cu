// dequantize on a GPU.
#include "codes.cuh"

namespace megatron_zpp::cuda {

namespace {

constexpr int kElements = 32;             // per lane and iteration
constexpr int kRun = 8;                   // neighbouring lanes hold neighbouring runs
constexpr int kTile = kElements * kWarp;  // per warp and iteration

struct DequantizeParams {
  Reader reader;
  MessageOrder position_of;
  void* output;
  int64_t row_stride;
  uint32_t blocks;  // in all rows
};

template <CodeType C, typename T, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, 4) dequantize_kernel(const __grid_constant__ DequantizeParams p) {
  constexpr int kRuns = kElements / kRun;
  const int log_block = p.reader.log_block;
  const uint32_t in_block = (1u << log_block) - 1;
  for (uint64_t tile = warp_index();; tile += warp_count()) {
    const uint32_t first = uint32_t(tile * kTile >> log_block);
    if (first >= p.blocks) break;
    uint32_t words[kRuns][words_of<C>(kRun)];
    uint32_t scale_words[kRuns], selectors[kRuns];
    T* target[kRuns];
    bool active[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t element = (uint32_t(tile * kTile) & in_block) + kRun * (r * kWarp + lane_index());
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
      float x[kRun];
      decode_codes<C>(words[r], x);
      const float scale = scale_of_word(scale_words[r], selectors[r]);
#pragma unroll
      for (int i = 0; i < kRun; ++i) x[i] *= scale;
      store_eight<ALIGNED>(target[r], x, active[r]);
    }
  }
}

template <CodeType C, typename T>
void launch_tiles(const Dequantize& op, CUstream_st* stream) {
  const int64_t row_blocks = op.columns / op.format.block;
  const DequantizeParams params{
      Reader(op.messages, op.format, op.rows / op.message_count * op.columns),
      MessageOrder(row_blocks, op.rows / op.message_count),
      op.output,
      op.row_stride,
      index_of(op.rows * row_blocks),
  };
  const int64_t tiles = (op.rows * op.columns + kTile - 1) / kTile;
  if (is_aligned(op.output, 16) && (op.rows == 1 || op.row_stride * sizeof(T) % 16 == 0))
    launch<dequantize_kernel<C, T, true>>(tiles, stream, params, kGridsForAll);
  else
    launch<dequantize_kernel<C, T, false>>(tiles, stream, params, kGridsForAll);
}

}  // namespace

void run(const Dequantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    with_dtype(op.output_dtype, [&](auto dtype) {
      launch_tiles<decltype(code_type)::value, typename decltype(dtype)::type>(op, stream);
    });
  });
}

}  // namespace megatron_zpp::cuda
