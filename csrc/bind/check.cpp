#include "check.h"

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <sstream>
#include <stdexcept>

namespace lighttransfer::bind {
namespace {

std::string join(const int64_t* values, size_t n) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < n; ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

std::string describe_sizes(std::initializer_list<int64_t> sizes) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (int64_t size : sizes) {
    text << separator;
    if (size == kAny) {
      text << '*';
    } else {
      text << size;
    }
    separator = ", ";
  }
  text << ']';
  return text.str();
}

std::string describe(const torch::stable::Device& device) {
  std::ostringstream text;
  if (device.is_cpu()) {
    text << "cpu";
  } else if (device.is_cuda()) {
    text << "cuda:" << device.index();
  } else {
    text << "device type " << static_cast<int>(device.type()) << ", index " << device.index();
  }
  return text.str();
}

}  // namespace

std::string describe_shape(const Tensor& t) {
  return join(t.sizes().data(), t.dim());
}

std::string describe_strides(const Tensor& t) {
  return "strides " + join(t.strides().data(), t.dim());
}

Checker::Checker(const char* op, const Tensor& first, const char* argument)
    : op_(op), device_(defined(first, argument).device()) {}

const Tensor& Checker::defined(const Tensor& t, const char* argument) const {
  if (!t.defined()) fail_type(argument, "be a tensor", "None");
  return t;
}

void Checker::fail_value(const char* argument, const std::string& rule,
                         const std::string& got) const {
  throw std::runtime_error(std::string("ValueError: ") + op_ + ": " + argument + " must " + rule +
                           ", got " + got);
}

void Checker::fail_type(const char* argument, const std::string& rule,
                        const std::string& got) const {
  throw std::runtime_error(std::string("TypeError: ") + op_ + ": " + argument + " must " + rule +
                           ", got " + got);
}

void Checker::range(const char* argument, int64_t value, int64_t low, int64_t high) const {
  if (value >= low && value <= high) return;
  fail_value(argument, "lie in [" + std::to_string(low) + ", " + std::to_string(high) + "]",
             std::to_string(value));
}

void Checker::shape(const Tensor& t, const char* argument, const char* shape,
                    std::initializer_list<int64_t> sizes) const {
  if (defined(t, argument).device() != device_) {
    fail_value(argument, "be on the device of the other tensors, " + describe(device_),
               describe(t.device()));
  }
  bool fits = t.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = sizes.begin()[i] == kAny || sizes.begin()[i] == t.size(i);
  }
  if (!fits) {
    fail_value(argument, std::string("have shape ") + shape + " = " + describe_sizes(sizes),
               describe_shape(t));
  }
}

void Checker::dtype(const Tensor& t, const char* argument, ScalarType expected) const {
  if (defined(t, argument).scalar_type() == expected) return;
  fail_type(argument, std::string("have dtype ") + toString(expected), toString(t.scalar_type()));
}

DType Checker::float_dtype(const Tensor& t, const char* argument) const {
#ifdef LIGHTTRANSFER_SIMULATOR
  const bool takes_float = false;  // the tensors lie on the CPU, the kernels are the GPU's
#else
  const bool takes_float = device_.is_cpu();
#endif
  switch (defined(t, argument).scalar_type()) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      if (takes_float) return DType::kFloat32;
      break;
    default:
      break;
  }
  fail_type(
      argument,
      takes_float ? "have dtype Half, BFloat16 or Float" : "have dtype Half or BFloat16 on a GPU",
      toString(t.scalar_type()));
}

void Checker::head_dim(const char* argument, int64_t d) const {
  if (d >= 8 && d <= kMaxHeadDim && d % 8 == 0) return;
  fail_value(argument, "have a head_dim that is a multiple of 8 in [8, 256]", std::to_string(d));
}

void Checker::heads(int64_t n_heads, int64_t n_kv_heads) const {
  if (n_kv_heads > 0 ? n_heads % n_kv_heads == 0 : n_heads == 0) return;
  fail_value("q", "have a number of heads that the number of KV heads divides",
             std::to_string(n_heads) + " heads over " + std::to_string(n_kv_heads) + " KV heads");
}

float Checker::scale(std::optional<double> scale, int64_t head_dim) const {
  const auto value =
      static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))));
  if (value > 0 && std::isfinite(value)) return value;
  std::ostringstream got;
  got << scale.value_or(value);
  fail_value("scale", "be a positive finite number", got.str());
}

void Checker::unit_stride(const Tensor& t, const char* argument) const {
  const int64_t last = t.dim() - 1;
  if (t.size(last) <= 1 || t.stride(last) == 1) return;
  fail_value(argument, "have unit stride in its last dimension", describe_strides(t));
}

Activation Checker::activation(const Tensor& t, const char* argument, const char* shape,
                               std::initializer_list<int64_t> sizes, ScalarType dtype) const {
  this->shape(t, argument, shape, sizes);
  this->dtype(t, argument, dtype);
  unit_stride(t, argument);
  return as_activation(t);
}

const int32_t* Checker::int32_vector(const Tensor& t, const char* argument, int64_t n) const {
  shape(t, argument, "[B]", {n});
  dtype(t, argument, ScalarType::Int);
  if (!t.is_contiguous()) {
    fail_value(argument, "be contiguous", "stride " + std::to_string(t.stride(0)));
  }
  return static_cast<const int32_t*>(t.data_ptr());
}

const int32_t* Checker::int32_vector(const std::optional<Tensor>& t, const char* argument,
                                     int64_t n) const {
  return t.has_value() ? int32_vector(*t, argument, n) : nullptr;
}

void Checker::row_range(const char* argument, const int32_t* values, int64_t n, int64_t low,
                        int64_t high) const {
  for (int64_t b = 0; values != nullptr && b < n; ++b) row_value(argument, values, b, low, high);
}

void Checker::row_value(const char* argument, const int32_t* values, int64_t b, int64_t low,
                        int64_t high) const {
  if (values[b] >= low && values[b] <= high) return;
  fail_value(argument,
             "lie in [" + std::to_string(low) + ", " + std::to_string(high) + "] in every row",
             std::to_string(values[b]) + " in row " + std::to_string(b));
}

Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}

Activation as_activation(const Tensor& t) {
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace lighttransfer::bind
