// The operators of torch.ops.megatron_zpp that multiply matrices.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checks.h"
#include "product.h"

#ifdef WITH_CUBLASLT
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace megatron_zpp {

namespace {

using at::Tensor;

constexpr std::string_view kCpuAlgorithm = "torch";  // the only one on CPUs
constexpr int64_t kMostAlgorithms = 64;

struct Sizes {
  int64_t m, n, k;
};

// Checks a product's arguments, and returns its sizes.
Sizes checked(const char* op, const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias,
              bool left_transposed, bool right_transposed) {
  for (const auto& [name, tensor] : {checks::Named{"left", &left}, checks::Named{"right", &right}})
    TORCH_CHECK_VALUE(tensor->dim() == 2 && (tensor->size(1) == 1 || tensor->stride(1) == 1) &&
                          tensor->stride(0) >= tensor->size(1),
                      op, ": ", name, " must be a matrix of contiguous rows, got ", tensor->sizes(), " with strides ",
                      tensor->strides());
  TORCH_CHECK_VALUE(right.scalar_type() == left.scalar_type(), op, ": right must be ", left.scalar_type(),
                    " as left, got ", right.scalar_type());
  const int64_t m = left.size(left_transposed ? 1 : 0), k = left.size(left_transposed ? 0 : 1);
  const int64_t n = right.size(right_transposed ? 0 : 1), terms = right.size(right_transposed ? 1 : 0);
  TORCH_CHECK_VALUE(terms == k, op, ": right must have as many terms per sum as left, ", k, ", got ", terms);
  if (bias) checks::contiguous(op, "bias", *bias, {left.scalar_type()}, {n});
  checks::same_device(op, {{"left", &left}, {"right", &right}, {"bias", bias ? &*bias : nullptr}});
  return {m, n, k};
}

// ---- CPUs ----

Tensor product_cpu(const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias, bool left_transposed,
                   bool right_transposed, std::string_view algorithm) {
  checked("product", left, right, bias, left_transposed, right_transposed);
  TORCH_CHECK_VALUE(algorithm == kCpuAlgorithm, "product: algorithm must be '", kCpuAlgorithm, "' on CPUs, got '",
                    algorithm, "'");
  const Tensor a = left_transposed ? left.t() : left, b = right_transposed ? right.t() : right;
  return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
}

std::vector<std::string> product_algorithms_cpu(const Tensor& left, const Tensor& right,
                                                const std::optional<Tensor>& bias, bool left_transposed,
                                                bool right_transposed, int64_t most) {
  checked("product_algorithms", left, right, bias, left_transposed, right_transposed);
  return {std::string(kCpuAlgorithm)};
}

// ---- GPUs ----

#ifdef WITH_CUBLASLT

MatrixProduct described(const char* op, const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias,
                  bool left_transposed, bool right_transposed, const Tensor& output, const Sizes& sizes) {
  const auto type = left.scalar_type();
  TORCH_CHECK_VALUE(type == at::kBFloat16 || type == at::kHalf, op, ": left must be bfloat16 or float16, got ", type);
  const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
  const MatrixProduct product{type == at::kBFloat16 ? DType::bf16 : DType::fp16,
                        sizes.m,
                        sizes.n,
                        sizes.k,
                        {left.const_data_ptr(), left.stride(0), left_transposed},
                        {right.const_data_ptr(), right.stride(0), right_transposed},
                        bias_data,
                        output.mutable_data_ptr()};
  for (const auto& [name, data] : {std::pair{"left", product.left.data}, {"right", product.right.data},
                                   {"bias", bias_data}, {"output", static_cast<const void*>(product.output)}})
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data) % kProductAlignment == 0, op, ": ", name,
                      " must begin at a multiple of ", kProductAlignment, " bytes");
  for (const auto& [name, stride] :
       {std::pair{"left", product.left.stride}, {"right", product.right.stride}, {"output", product.n}})
    TORCH_CHECK_VALUE(2 * stride % kProductAlignment == 0, op, ": rows of ", name, " must begin at multiples of ",
                      kProductAlignment, " bytes, got a stride of ", stride, " elements");
  return product;
}

Tensor product_cuda(const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias, bool left_transposed,
                    bool right_transposed, std::string_view algorithm) {
  const Sizes sizes = checked("product", left, right, bias, left_transposed, right_transposed);
  const c10::cuda::CUDAGuard guard(left.device());
  const Tensor output = at::empty({sizes.m, sizes.n}, left.options());
  if (output.numel() == 0) return output;
  TORCH_CHECK_VALUE(sizes.k > 0, "product: left must have terms to sum, got ", left.sizes());
  const MatrixProduct product = described("product", left, right, bias, left_transposed, right_transposed, output, sizes);
  try {
    const Algorithm chosen = Algorithm::named(algorithm);
    const Tensor workspace = at::empty({int64_t(chosen.workspace_bytes)}, left.options().dtype(at::kByte));
    cuda::run(product, chosen, workspace.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream().stream());
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  return output;
}

std::vector<std::string> product_algorithms_cuda(const Tensor& left, const Tensor& right,
                                                 const std::optional<Tensor>& bias, bool left_transposed,
                                                 bool right_transposed, int64_t most) {
  const char* op = "product_algorithms";
  const Sizes sizes = checked(op, left, right, bias, left_transposed, right_transposed);
  TORCH_CHECK_VALUE(most > 0 && most <= kMostAlgorithms, op, ": most must be from 1 to ", kMostAlgorithms, ", got ",
                    most);
  TORCH_CHECK_VALUE(sizes.m > 0 && sizes.n > 0 && sizes.k > 0, op, ": left and right must not be empty, got ",
                    left.sizes(), " and ", right.sizes());
  const c10::cuda::CUDAGuard guard(left.device());
  const Tensor output = at::empty({sizes.m, sizes.n}, left.options());
  const MatrixProduct product = described(op, left, right, bias, left_transposed, right_transposed, output, sizes);
  std::vector<std::string> names;
  for (const Algorithm& algorithm : cuda::algorithms_of(product, most)) names.push_back(algorithm.name());
  return names;
}

int64_t cublaslt_version() { return cuda::cublaslt_version(); }

#else

int64_t cublaslt_version() { return 0; }

#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(megatron_zpp, library) {
  library.def(
      "product(Tensor left, Tensor right, Tensor? bias, bool left_transposed, bool right_transposed, str algorithm) "
      "-> Tensor");
  library.def(
      "product_algorithms(Tensor left, Tensor right, Tensor? bias, bool left_transposed, bool right_transposed, "
      "int most) -> str[]");
  library.def("cublaslt_version() -> int", cublaslt_version);
}

TORCH_LIBRARY_IMPL(megatron_zpp, CPU, library) {
  library.impl("product", TORCH_FN(product_cpu));
  library.impl("product_algorithms", TORCH_FN(product_algorithms_cpu));
}

#ifdef WITH_CUBLASLT
TORCH_LIBRARY_IMPL(megatron_zpp, CUDA, library) {
  library.impl("product", TORCH_FN(product_cuda));
  library.impl("product_algorithms", TORCH_FN(product_algorithms_cuda));
}
#endif

}  // namespace megatron_zpp
