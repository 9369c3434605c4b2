// The sum of messages, in order, of the runs of elements that a lane holds.
#pragma once

#include "codes.cuh"

namespace megatron_zpp::cuda {

struct Addends {
  Reader reader;
  uint32_t count;
  float fused_below;  // scales for which an fma says the same as a product and a sum

  // With a bf16 scale the product is exact, so it does, unless the product overflows: only an fma could still come
  // back from there.
  Addends(const uint8_t* messages, const Format& format, int64_t elements, int64_t count)
      : reader(messages, format, elements), count(index_of(count)) {
    index_of(elements / 16);  // so that runs of eight can be counted in 32 bits
    const float largest_code = format.codes == Codes::fp8 ? 448.f : float(1 << (bits_of_code(format.codes) - 1));
    fused_below = format.scales == Scales::fp32 ? 0.f : 0x1.fffffep127f / largest_code;
  }
};

enum class Step { set, fused, apart };

// sum becomes fl(code * scale), or fl(sum + fl(code * scale)) as an fma or as two steps.
template <Codes C, Step STEP, int RUN>
__device__ __forceinline__ void add_run(const uint32_t (&words)[words_of<C>(RUN)], float scale, float (&sum)[RUN]) {
#pragma unroll
  for (int i = 0; i < RUN; i += 8) {  // only eight codes are numbers at once
    uint32_t part[words_of<C>(8)];
    float codes[8];
#pragma unroll
    for (int w = 0; w < words_of<C>(8); ++w) part[w] = words[words_of<C>(i) + w];
    decode_codes<C>(part, codes);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (STEP == Step::set) sum[i + j] = codes[j] * scale;
      if constexpr (STEP == Step::fused) sum[i + j] = fmaf(codes[j], scale, sum[i + j]);
      if constexpr (STEP == Step::apart) sum[i + j] += codes[j] * scale;
    }
  }
}

// The sum of messages, in order, of the K runs of RUN elements that a lane holds. BATCH messages are loaded ahead: by
// `begin` the first ones, so that work on another sum can hide them, and then each in the place of one just added.
template <Codes C, int RUN, int K>
class RunSum {
 public:
  // `run` counts runs of RUN elements from the beginning of a message; each lies in one block.
  __device__ __forceinline__ void begin(const Addends& addends, const uint32_t (&run)[K]) {
    const Reader& reader = addends.reader;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      next_codes_[k] = reader.codes_of_run<C, RUN>(reader.messages, run[k]);
      next_scale_words_[k] = reader.scale_word_of_run<RUN>(reader.messages, run[k]);
      selectors_[k] = reader.scale_selector_of_run<RUN>(run[k]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) load_next(addends, j, j < addends.count);
  }

  __device__ __forceinline__ void finish(const Addends& addends, float (&sum)[K][RUN]) {
    add_batch<true>(addends, 0, sum);
    for (uint32_t first = kBatch; first < addends.count; first += kBatch) add_batch<false>(addends, first, sum);
  }

 private:
  // Runs in several places take so many registers for pointers that there is room for one message only.
  static constexpr int kBatch = K == 1 ? 2 : 1;

  // Steps to the next message even where there is none: additions under a condition are more instructions.
  __device__ __forceinline__ void load_next(const Addends& addends, int j, bool exists) {
    if (exists) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        scale_words_[j][k] = load_scale_word(next_scale_words_[k]);
        load_words(next_codes_[k], words_[j][k]);
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      next_scale_words_[k] += addends.reader.bytes;
      next_codes_[k] += addends.reader.bytes;
    }
  }

  // Adds the messages from `first` on; with FIRST the first of all is among them.
  template <bool FIRST>
  __device__ __forceinline__ void add_batch(const Addends& addends, uint32_t first, float (&sum)[K][RUN]) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (j > 0 && first + j >= addends.count) break;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const float scale = scale_of_word(scale_words_[j][k], selectors_[k]);
        if (FIRST && j == 0)
          add_run<C, Step::set>(words_[j][k], scale, sum[k]);
        else if (fabsf(scale) < addends.fused_below)
          add_run<C, Step::fused>(words_[j][k], scale, sum[k]);
        else
          add_run<C, Step::apart>(words_[j][k], scale, sum[k]);
      }
      load_next(addends, j, first + j + kBatch < addends.count);
    }
  }

  const uint8_t* next_codes_[K];
  const uint8_t* next_scale_words_[K];
  uint32_t selectors_[K];
  uint32_t words_[kBatch][K][words_of<C>(RUN)];
  uint32_t scale_words_[kBatch][K];
};

}  // namespace megatron_zpp::cuda
