// Products by cuBLASLt ("cuBLAS Library User Guide", section "Using the cuBLASLt API").
//
// The library is not named to the linker: its functions are those of the one that torch has loaded, so the version is
// always torch's. A torch without it fails only in products.
#ifdef WITH_CUBLASLT

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <mutex>
#include <stdexcept>

#include "product.h"

namespace megatron_zpp::cuda {

namespace {

static_assert(sizeof(Algorithm::description) == sizeof(cublasLtMatmulAlgo_t));

// Reductions of parts of a sum in fp32 alone. Others would round the parts to 16 bits.
constexpr uint32_t kReductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

#define CUBLASLT_FUNCTIONS(EACH) \
  EACH(Create) \
  EACH(GetStatusString) \
  EACH(GetVersion) \
  EACH(Matmul) \
  EACH(MatmulAlgoGetHeuristic) \
  EACH(MatmulDescCreate) \
  EACH(MatmulDescDestroy) \
  EACH(MatmulDescSetAttribute) \
  EACH(MatmulPreferenceCreate) \
  EACH(MatmulPreferenceDestroy) \
  EACH(MatmulPreferenceSetAttribute) \
  EACH(MatrixLayoutCreate) \
  EACH(MatrixLayoutDestroy)

struct Library {
#define EACH(NAME) decltype(&cublasLt##NAME) NAME;
  CUBLASLT_FUNCTIONS(EACH)
#undef EACH
};

#define TEXT_OF(NUMBER) #NUMBER
#define NAME_OF(MAJOR) "libcublasLt.so." TEXT_OF(MAJOR)

Library loaded() {
  const char* name = NAME_OF(CUBLAS_VER_MAJOR);  // that of the headers, whose structures it must share
  void* file = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  if (file == nullptr) throw std::runtime_error(std::string("megatron_zpp: products need a torch that loads ") + name);
  Library library;
#define EACH(NAME)                                                                             \
  library.NAME = reinterpret_cast<decltype(library.NAME)>(dlsym(file, "cublasLt" #NAME));      \
  if (library.NAME == nullptr)                                                                 \
    throw std::runtime_error(std::string("megatron_zpp: ") + name + " has no cublasLt" #NAME);
  CUBLASLT_FUNCTIONS(EACH)
#undef EACH
  return library;
}

const Library& library() {
  static const Library found = loaded();
  return found;
}

std::string described(const MatrixProduct& product) {
  return "(" + std::to_string(product.m) + ", " + std::to_string(product.k) + ") @ (" + std::to_string(product.k) +
         ", " + std::to_string(product.n) + ")";
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("megatron_zpp: ") + what + ": " + library().GetStatusString(status));
}

// One per device, made at first use and kept: handles may be used by several threads.
cublasLtHandle_t handle() {
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, 128> handles{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= int(handles.size()))
    throw std::runtime_error("megatron_zpp: products need a CUDA device below 128");
  const std::lock_guard<std::mutex> lock(mutex);
  if (handles[device] == nullptr) check(library().Create(&handles[device]), "cublasLtCreate");
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

void destroy_layout(cublasLtMatrixLayout_t layout) { library().MatrixLayoutDestroy(layout); }
void destroy_operation(cublasLtMatmulDesc_t operation) { library().MatmulDescDestroy(operation); }
void destroy_preference(cublasLtMatmulPreference_t preference) { library().MatmulPreferenceDestroy(preference); }

using Layout = Owned<cublasLtMatrixLayout_t, destroy_layout>;
using Operation = Owned<cublasLtMatmulDesc_t, destroy_operation>;
using Preference = Owned<cublasLtMatmulPreference_t, destroy_preference>;

// cuBLASLt reads matrices column by column, so it computes the transpose: output^T = right^T @ left^T.
class Description {
 public:
  explicit Description(const MatrixProduct& product) : type_(product.dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_16F) {
    check(library().MatmulDescCreate(operation.address(), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
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
    check(library().MatmulDescSetAttribute(operation, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  // `rows` and `columns` as cuBLASLt counts them, of the factor before its transposition is undone.
  void create(Layout& layout, int64_t rows, int64_t columns, const Factor& factor) {
    if (factor.transposed) std::swap(rows, columns);
    check(library().MatrixLayoutCreate(layout.address(), type_, uint64_t(rows), uint64_t(columns), factor.stride),
          "cublasLtMatrixLayoutCreate");
  }

  cudaDataType_t type_;
};

template <typename T>
void prefer(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(library().MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

}  // namespace

std::vector<Algorithm> algorithms_of(const MatrixProduct& product, int64_t most) {
  const cublasLtHandle_t context = handle();
  const Description description(product);
  Preference preference;
  check(library().MatmulPreferenceCreate(preference.address()), "cublasLtMatmulPreferenceCreate");
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMostWorkspace);
  prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductions);
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    prefer(preference, attribute, uint32_t(kProductAlignment));
  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int found = 0;
  const cublasStatus_t status = library().MatmulAlgoGetHeuristic(
      context, description.operation, description.right, description.left, description.output, description.output,
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
  const cublasLtHandle_t context = handle();
  const Description description(product);
  cublasLtMatmulAlgo_t algo;
  std::memcpy(algo.data, algorithm.description, sizeof algo.data);
  const float one = 1.f, zero = 0.f;
  const cublasStatus_t status =
      library().Matmul(context, description.operation, &one, product.right.data, description.right, product.left.data,
                     description.left, &zero, product.output, description.output, product.output, description.output,
                     &algo, workspace, algorithm.workspace_bytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::invalid_argument("product: algorithm must be one of product_algorithms for " + described(product) +
                                " on this device: " + library().GetStatusString(status));
}

int64_t cublaslt_version() {
  return int64_t(library().GetVersion());
}

}  // namespace megatron_zpp::cuda

#endif
