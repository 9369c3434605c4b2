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

// Where the runs of a lane are in the next message.
template <int K>
struct Runs {
  const uint8_t* codes[K];
  const uint8_t* scale_words[K];
  uint32_t selectors[K];
};

// Adds the next BATCH messages, whose loads are under way together; with FIRST the first of all is among them.
template <Codes C, int BATCH, bool FIRST, int RUN, int K>
__device__ __forceinline__ void add_batch(const Addends& addends, Runs<K>& runs, float (&sum)[K][RUN]) {
  uint32_t words[BATCH][K][words_of<C>(RUN)];
  uint32_t scale_words[BATCH][K];
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      scale_words[j][k] = load_scale_word(runs.scale_words[k]);
      load_words(runs.codes[k], words[j][k]);
      runs.scale_words[k] += addends.reader.bytes;
      runs.codes[k] += addends.reader.bytes;
    }
  }
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float scale = scale_of_word(scale_words[j][k], runs.selectors[k]);
      if (FIRST && j == 0)
        add_run<C, Step::set>(words[j][k], scale, sum[k]);
      else if (fabsf(scale) < addends.fused_below)
        add_run<C, Step::fused>(words[j][k], scale, sum[k]);
      else
        add_run<C, Step::apart>(words[j][k], scale, sum[k]);
    }
  }
}

// BATCH messages at a time, then what is left in smaller batches.
template <Codes C, int BATCH, int RUN, int K>
__device__ __forceinline__ void add_rest(const Addends& addends, uint32_t left, Runs<K>& runs, float (&sum)[K][RUN]) {
  for (; left >= BATCH; left -= BATCH) add_batch<C, BATCH, false>(addends, runs, sum);
  if constexpr (BATCH > 1) add_rest<C, BATCH / 2>(addends, left, runs, sum);
}

template <Codes C, int BATCH, int RUN, int K>
__device__ __forceinline__ void add_all(const Addends& addends, Runs<K>& runs, float (&sum)[K][RUN]) {
  if constexpr (BATCH > 1) {
    if (addends.count < BATCH) return add_all<C, BATCH / 2>(addends, runs, sum);
  }
  add_batch<C, BATCH, true>(addends, runs, sum);
  add_rest<C, BATCH>(addends, addends.count - BATCH, runs, sum);
}

// sum[k] becomes the sum of the RUN elements from start[k] on. They lie in one block.
template <Codes C, int RUN, int K>
__device__ __forceinline__ void sum_messages(const Addends& addends, const uint64_t (&start)[K],
                                             float (&sum)[K][RUN]) {
  // As many messages at a time as about 20 registers can take under way.
  constexpr int registers = K * (words_of<C>(RUN) + 1);
  constexpr int batch = registers <= 5 ? 4 : registers <= 10 ? 2 : 1;
  const Reader& reader = addends.reader;
  Runs<K> runs;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    runs.codes[k] = reader.codes_at<C>(reader.messages, start[k]);
    runs.scale_words[k] = reader.scale_word_at(reader.messages, start[k]);
    runs.selectors[k] = reader.scale_selector(start[k]);
  }
  add_all<C, batch>(addends, runs, sum);
}

}  // namespace megatron_zpp::cuda
