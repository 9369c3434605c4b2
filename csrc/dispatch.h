// Calls code that is compiled for each code type and dtype with those of run time.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "operations.h"

namespace megatron_zpp {

template <CodeType C>
using CodeTypeConstant = std::integral_constant<CodeType, C>;

template <typename T>
struct DTypeTag {
  using type = T;
};

// Calls run(CodeTypeConstant<...>()).
template <typename Run>
void with_code_type(CodeType code_type, Run&& run) {
  switch (code_type) {
    case CodeType::int8: return run(CodeTypeConstant<CodeType::int8>());
    case CodeType::int4: return run(CodeTypeConstant<CodeType::int4>());
  }
  throw std::invalid_argument("megatron_zpp: unknown code type " + std::to_string(int(code_type)));
}

// Calls run(DTypeTag<...>()).
template <typename Run>
void with_dtype(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::fp32: return run(DTypeTag<float>());
    case DType::bf16: return run(DTypeTag<Bf16>());
    case DType::fp16: return run(DTypeTag<Fp16>());
  }
  throw std::invalid_argument("megatron_zpp: unknown dtype " + std::to_string(int(dtype)));
}

}  // namespace megatron_zpp
