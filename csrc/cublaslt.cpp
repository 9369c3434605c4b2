// Products by cuBLASLt ("cuBLAS Library User Guide", section "Using the cuBLASLt API").
//
// The library is not named to the linker: torch's libraries need it, so its functions are found among theirs, and the
// version is always torch's.
#ifdef WITH_CUBLASLT

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "product.h"

// Without them in torch's libraries only products fail, and not the loading of all operators.
#pragma weak cublasLtCreate
#pragma weak cublasLtGetStatusString
#pragma weak cublasLtGetVersion
#pragma weak cublasLtMatmul
#pragma weak cublasLtMatmulAlgoGetHeuristic
#pragma weak cublasLtMatmulDescCreate
#pragma weak cublasLtMatmulDescDestroy
#pragma weak cublasLtMatmulDescSetAttribute
#pragma weak cublasLtMatmulPreferenceCreate
#pragma weak cublasLtMatmulPreferenceDestroy
#pragma weak cublasLtMatmulPreferenceSetAttribute
#pragma weak cublasLtMatrixLayoutCreate
#pragma weak cublasLtMatrixLayoutDestroy

namespace megatron_zpp::cuda {

namespace {

static_assert(sizeof(Algorithm::description) == sizeof(cublasLtMatmulAlgo_t));

// Reductions of parts of a sum in fp32 alone. Others would round the parts to 16 bits.
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

std::string described(const MatrixProduct& product) {
  return "(" + std::to_string(product.m) + ", " + std::to_string(product.k) + ") @ (" + std::to_string(product.k) +
         ", " + std::to_string(product.n) + ")";
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("megatron_zpp: ") + what + ": " + cublasLtGetStatusString(status));
}

void check_library() {
  if (cublasLtCreate == nullptr || cublasLtMatmul == nullptr)
    throw std::runtime_error("megatron_zpp: products need a torch that loads cuBLASLt as a shared library");
}

// One per device, made at first use and kept: handles may be used by several threads.
cublasLtHandle_t handle() {
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, 128> handles{};
  check_library();
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= int(handles.size()))
    throw std::runtime_error("megatron_zpp: products need a CUDA device below 128");
  const std::lock_guard<std::mutex> lock(mutex);
  if (handles[device] == nullptr) check(cublasLtCreate(&handles[device]), "cublasLtCreate");
  return handles[device];
}

template <typename T, auto destroy>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (value_ != nullptr) destroy(value_);
  }
  T* address() { return &value_; }
  operator T() const { return value_; }

 private:
  T value_ = nullptr;
};

void destroy_layout(cublasLtMatrixLayout_t layout) { cublasLtMatrixLayoutDestroy(layout); }
void destroy_operation(cublasLtMatmulDesc_t operation) { cublasLtMatmulDescDestroy(operation); }
void destroy_preference(cublasLtMatmulPreference_t preference) { cublasLtMatmulPreferenceDestroy(preference); }

using Layout = Owned<cublasLtMatrixLayout_t, destroy_layout>;
using Operation = Owned<cublasLtMatmulDesc_t, destroy_operation>;
using Preference = Owned<cublasLtMatmulPreference_t, destroy_preference>;

// cuBLASLt reads matrices column by column, so it computes the transpose: output^T = right^T @ left^T.
class Description {
 public:
  explicit Description(const MatrixProduct& product) : type_(product.dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F) {
    check(cublasLtMatmulDescCreate(operation.address(), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, transposition(product.right));
    set(CUBLASLT_MATMUL_DESC_TRANSB, transposition(product.left));
    if (product.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_);
    }
    create(right, product.n, product.k, product.right);
    create(left, product.k, product.m, product.left);
    create(output, product.n, product.m, {product.output, product.n, false});
  }

  Operation operation;
  Layout right, left, output;

 private:
  static cublasOperation_t transposition(const Factor& factor) { return factor.transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  // `rows` and `columns` as cuBLASLt counts them, of the factor before its transposition is undone.
  void create(Layout& layout, int64_t rows, int64_t columns, const Factor& factor) {
    if (factor.transposed) std::swap(rows, columns);
    check(cublasLtMatrixLayoutCreate(layout.address(), type_, uint64_t(rows), uint64_t(columns), factor.stride),
          "cublasLtMatrixLayoutCreate");
  }

  cudaDataType_t type_;
};

template <typename T>
void prefer(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

}  // namespace

std::vector<Algorithm> algorithms_of(const MatrixProduct& product, int64_t most) {
  const cublasLtHandle_t library = handle();
  const Description description(product);
  Preference preference;
  check(cublasLtMatmulPreferenceCreate(preference.address()), "cublasLtMatmulPreferenceCreate");
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace);
  prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions);
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(preference, attribute, uint32_t(kProductAlignment));
  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      library, description.operation, description.right, description.left, description.output, description.output,
      preference, int(most), results.data(), &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS || results[i].workspaceSize > kMostWorkspace) continue;
    Algorithm algorithm;
    std::memcpy(algorithm.description, results[i].algo.data, sizeof algorithm.description);
    algorithm.workspace_bytes = results[i].workspaceSize;
    algorithms.push_back(algorithm);
  }
  return algorithms;
}

void run(const MatrixProduct& product, const Algorithm& algorithm, void* workspace, CUstream_st* stream) {
  const cublasLtHandle_t library = handle();
  const Description description(product);
  cublasLtMatmulAlgo_t algo;
  std::memcpy(algo.data, algorithm.description, sizeof algo.data);
  const float one = 1.f, zero = 0.f;
  const cublasStatus_t status =
      cublasLtMatmul(library, description.operation, &one, product.right.data, description.right, product.left.data,
                     description.left, &zero, product.output, description.output, product.output, description.output,
                     &algo, workspace, algorithm.workspace_bytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::invalid_argument("product: algorithm must be one of product_algorithms for " + described(product) +
                                " on this device: " + cublasLtGetStatusString(status));
}

int64_t cublaslt_version() {
  check_library();
  return int64_t(cublasLtGetVersion());
}

}  // namespace megatron_zpp::cuda

#endif
