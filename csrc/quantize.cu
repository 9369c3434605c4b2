// quantize on a GPU.
#include "blocks.cuh"

namespace megatron_zpp::cuda {

namespace {

struct QuantizeParams {
  const void* input;
  int64_t row_stride;
  uint32_t blocks;  // in all rows
  MessageOrder position_of;
  Lanes lanes;
  Writer writer;
};

// V vectors of eight elements per lane and block. Several small blocks are encoded at a time, to have four loads in
// flight.
template <CodeType C, typename T, int V, bool ALIGNED>
__global__ void __launch_bounds__(kThreads, V == 8 ? 2 : 4) quantize_kernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kBlocks = V >= 4 ? 1 : 4 / V;  // per iteration
  const uint32_t groups = p.lanes.groups(), tile = groups * kBlocks;
  for (uint32_t first = warp_index() * tile; first < p.blocks; first += warp_count() * tile) {
    BlockPosition position[kBlocks];
    Eight<T, ALIGNED> loaded[kBlocks][V];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      // Lanes past the end load the last block again.
      position[b] = p.position_of(min(first + b * groups + p.lanes.group(), p.blocks - 1));
      const T* block = static_cast<const T*>(p.input) + position[b].row * p.row_stride +
                       (int64_t(position[b].column_block) << p.writer.log_block);
#pragma unroll
      for (int v = 0; v < V; ++v) loaded[b][v].load(block + p.lanes.run<8>(v));
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float x[V][8];
#pragma unroll
      for (int v = 0; v < V; ++v) loaded[b][v].to_floats(x[v]);
      const bool active = first + b * groups + p.lanes.group() < p.blocks;
      write_block<C>(p.writer, p.lanes, p.writer.message(position[b].message), position[b].block, x, active);
    }
  }
}

template <CodeType C, typename T, int V>
void launch_vectors(const QuantizeParams& params, bool aligned, CUstream_st* stream) {
  const int64_t tile = int64_t(params.lanes.groups()) * (V >= 4 ? 1 : 4 / V);
  const int64_t tiles = (params.blocks + tile - 1) / tile;
  if (aligned)
    launch<quantize_kernel<C, T, V, true>>(tiles, stream, params);
  else
    launch<quantize_kernel<C, T, V, false>>(tiles, stream, params);
}

template <CodeType C, typename T>
void launch_blocks(const Quantize& op, CUstream_st* stream) {
  const int block = op.format.block;
  const int vectors = vectors_a_lane(block);
  const int64_t row_blocks = op.columns / block;
  const bool aligned = is_aligned(op.input, 16) && (op.rows == 1 || op.row_stride * sizeof(T) % 16 == 0);
  const QuantizeParams params{
      op.input,
      op.row_stride,
      index_of(op.rows * row_blocks),
      MessageOrder(row_blocks, op.rows / op.message_count),
      Lanes{log2_of(block / (8 * vectors))},
      Writer(op.messages, op.format, op.rows / op.message_count * op.columns),
  };
  switch (vectors) {
    case 1: return launch_vectors<C, T, 1>(params, aligned, stream);
    case 4: return launch_vectors<C, T, 4>(params, aligned, stream);
    case 8: return launch_vectors<C, T, 8>(params, aligned, stream);
  }
  throw std::invalid_argument("quantize: no kernel for blocks of " + std::to_string(block));
}

}  // namespace

void run(const Quantize& op, CUstream_st* stream) {
  with_code_type(op.format.code_type, [&](auto code_type) {
    with_dtype(op.input_dtype, [&](auto dtype) {
      launch_blocks<decltype(code_type)::value, typename decltype(dtype)::type>(op, stream);
    });
  });
}

}  // namespace megatron_zpp::cuda
