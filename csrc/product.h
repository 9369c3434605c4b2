// Products of 16-bit matrices by an algorithm of cuBLASLt that the caller names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "operations.h"

namespace megatron_zpp {

// A factor as it is stored, row by row, `stride` elements from one row to the next; `transposed`: the factor is the
// transpose of what is stored.
struct Factor {
  const void* data;
  int64_t stride;
  bool transposed;
};

// output (m, n) = left (m, k) @ right (k, n) + bias (n), with sums in fp32.
struct MatrixProduct {
  DType dtype;  // of all tensors: bf16 or fp16
  int64_t m, n, k;
  Factor left, right;
  const void* bias;  // or null
  void* output;      // contiguous
};

// cuBLASLt's algorithms assume that every address and every stride is a multiple of this.
constexpr int64_t kProductAlignment = 16;

// An algorithm with its parameters, and the workspace that it needs. Its name is hexadecimal: the bytes of cuBLASLt's
// description, which one version of cuBLASLt understands on one kind of GPU, then those of the workspace's size.
struct Algorithm {
  uint64_t description[8];
  uint64_t workspace_bytes;

  std::string name() const;
  static Algorithm named(std::string_view name);  // throws std::invalid_argument
};

constexpr uint64_t kMostWorkspace = uint64_t(32) << 20;  // torch's own on Hopper GPUs

namespace cuda {

// The first `most` algorithms that cuBLASLt's heuristics name for a product, in their order.
std::vector<Algorithm> algorithms_of(const MatrixProduct& product, int64_t most);

// Throws std::invalid_argument if the algorithm cannot compute the product on this device.
void run(const MatrixProduct& product, const Algorithm& algorithm, void* workspace, CUstream_st* stream);

// The version of cuBLASLt in this process.
int64_t cublaslt_version();

}  // namespace cuda

}  // namespace megatron_zpp
