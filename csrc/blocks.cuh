// Encodes whole blocks with groups of lanes, and writes them to messages.
//
// 2^log_lanes neighbouring lanes hold a block, each K runs of RUN elements: run k of member l begins at element
// (k * lanes + l) * RUN of the block. Neighbouring lanes access neighbouring memory, and all reductions are shuffles.
#pragma once

#include "codes.cuh"

namespace megatron_zpp::cuda {

// The assignment of a warp's lanes to blocks.
struct Lanes {
  int log_lanes;  // lanes per block

  __device__ __forceinline__ uint32_t member() const { return lane_index() & ((1u << log_lanes) - 1); }
  __device__ __forceinline__ uint32_t group() const { return lane_index() >> log_lanes; }
  __host__ __device__ __forceinline__ uint32_t groups() const { return kWarp >> log_lanes; }

  // The first element of run k of this lane, counted from the beginning of the block.
  template <int RUN>
  __device__ __forceinline__ uint32_t run(int k) const {
    return k * step<RUN>() + member() * RUN;
  }

  // Elements from one run of a lane to its next.
  template <int RUN>
  __device__ __forceinline__ uint32_t step() const {
    return RUN << log_lanes;
  }
};

// Vectors of eight elements per lane: 1, 4 or 8. Four loads in flight hide the memory's latency, and the work per block
// and lane is then small per element.
inline int vectors_a_lane(int block) { return block < 128 ? 1 : block <= 1024 ? 4 : 8; }

// Writes messages of one format.
struct Writer {
  uint8_t* messages;
  int64_t code_bytes, bytes;  // of one message
  uint32_t padded_block;      // the last block, whose scale precedes the padding; no block's index without padding
  uint32_t padding;           // bytes of zeros at the end of a message
  int log_block;

  Writer(uint8_t* messages, const Format& format, int64_t elements)
      : messages(messages), log_block(log2_of(format.block)) {
    const MessageLayout layout = message_layout(format, elements);
    code_bytes = layout.code_bytes;
    bytes = layout.bytes;
    padding = uint32_t(layout.bytes - layout.used_bytes);
    padded_block = padding > 0 ? index_of(layout.blocks) - 1 : uint32_t(kIndexLimit);
  }

  __device__ __forceinline__ uint8_t* message(uint32_t index) const { return messages + index * bytes; }

  template <CodeType C>
  __device__ __forceinline__ uint8_t* codes(uint8_t* message, uint32_t block) const {
    return message + uint64_t(block) * (uint32_t(bits_of_code(C)) << log_block >> 3);
  }

  // One lane per block must call this. Stores the scale, and after the last one the padding.
  __device__ __forceinline__ void store_scale(uint8_t* message, uint32_t block, float stored) const {
    uint8_t* scale = message + code_bytes + uint64_t(block) * kScaleBytes;
    *reinterpret_cast<uint16_t*>(scale) = uint16_t(bits_of(stored) >> 16);  // exact: rounded already
    if (block == padded_block) {
#pragma unroll 1
      for (uint32_t at = 0; at < padding; at += 2) *reinterpret_cast<uint16_t*>(scale + kScaleBytes + at) = 0;
    }
  }
};

// The key of the lane's signed peak. Positive numbers are largest as signed integers, negative ones as unsigned
// integers; both grow with the magnitude, and NaN is beyond infinity. Hopper computes the maximum of three integers in
// one instruction, so this takes one instruction per number, and a key of each number would take three.
template <int RUN, int K>
__device__ __forceinline__ uint32_t largest_key(const float (&x)[K][RUN]) {
  int32_t positive = INT32_MIN;
  uint32_t negative = 0;
#pragma unroll
  for (int i = 0; i < K * RUN; i += 2) {
    const uint32_t a = bits_of(x[i / RUN][i % RUN]), b = bits_of(x[i / RUN][i % RUN + 1]);
    positive = max(positive, max(int32_t(a), int32_t(b)));
    negative = max(negative, max(a, b));
  }
  return max(peak_key(float_of(positive)), peak_key(float_of(negative)));
}

// Encodes one run.
template <CodeType C, int RUN>
__device__ __forceinline__ void encode_run(const float (&x)[RUN], const BlockScale& scale,
                                           uint32_t (&words)[words_of<C>(RUN)]) {
#pragma unroll
  for (int i = 0; i < RUN; i += 8) {
    float eight[8];
    uint32_t part[words_of<C>(8)];
#pragma unroll
    for (int j = 0; j < 8; ++j) eight[j] = x[i + j];
    encode_eight<C>(eight, scale.inverse, scale.code_mask, part);
#pragma unroll
    for (int w = 0; w < words_of<C>(8); ++w) words[words_of<C>(i) + w] = part[w];
  }
}

// Encodes x as block `block` of `message`. All lanes of a warp must call this; lanes without a block are not `active`
// and write nothing.
template <CodeType C, int RUN, int K>
__device__ __forceinline__ void write_block(const Writer& writer, const Lanes& lanes, uint8_t* message, uint32_t block,
                                            const float (&x)[K][RUN], bool active) {
  const uint32_t key = largest_of_lanes(largest_key(x), lanes.log_lanes);
  const BlockScale scale = block_scale(key, scale_factor(C));
  const uint32_t start = lanes.run<RUN>(0), step = lanes.step<RUN>();
  uint32_t words[K][words_of<C>(RUN)];
#pragma unroll
  for (int k = 0; k < K; ++k) encode_run<C>(x[k], scale, words[k]);
  if (!active) return;
  uint8_t* codes = writer.codes<C>(message, block) + start * bits_of_code(C) / 8;
#pragma unroll
  for (int k = 0; k < K; ++k) store_words(codes + k * step * bits_of_code(C) / 8, words[k]);
  if (lanes.member() == 0) writer.store_scale(message, block, scale.stored);
}

}  // namespace megatron_zpp::cuda
