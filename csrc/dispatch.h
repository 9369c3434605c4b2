// Run-time formats to compile-time ones.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "operations.h"

namespace megatron_zpp {

template <Codes C>
using CodesConstant = std::integral_constant<Codes, C>;

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls run(CodesConstant<...>()).
template <typename Run>
void with_codes(Codes codes, Run&& run) {
  switch (codes) {
    case Codes::int8: return run(CodesConstant<Codes::int8>());
    case Codes::int4: return run(CodesConstant<Codes::int4>());
    case Codes::fp8: return run(CodesConstant<Codes::fp8>());
  }
  throw std::invalid_argument("megatron_zpp: unknown codes " + std::to_string(int(codes)));
}

// Calls run(TypeTag<...>()).
template <typename Run>
void with_type(Type type, Run&& run) {
  switch (type) {
    case Type::fp32: return run(TypeTag<float>());
    case Type::bf16: return run(TypeTag<Bf16>());
    case Type::fp16: return run(TypeTag<Fp16>());
  }
  throw std::invalid_argument("megatron_zpp: unknown type " + std::to_string(int(type)));
}

}  // namespace megatron_zpp
