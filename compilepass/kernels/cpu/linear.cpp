// The ops of matrix multiplication.
#include "matmul.h"
#include "op.h"
#include "widened.h"

namespace compilepass {
namespace {

constexpr int64_t kWidestExact = 65536;  // 255 * 128 * width fits an int32

// Checks that the operands fit, and keeps them as the kernels read them.
struct Weights {
  Tensor w, scales;
  std::optional<Tensor> biases;
  int64_t width, columns;

  Weights(
      const Tensor& x, const Tensor& wq, const Tensor& wscale, const std::optional<Tensor>& bias)
      : w(dense(wq)), scales(dense(wscale)), width(x.size(-1)), columns(wq.size(0)) {
    STD_TORCH_CHECK(
        wq.dim() == 2 && wq.size(1) == width, "x and w are equally wide, not ", width, " and ",
        wq.size(-1), ".");
    STD_TORCH_CHECK(
        wscale.numel() == columns && (!bias || bias->numel() == columns),
        "wscale and bias hold a value a row of w.");
    if (bias) biases = dense(torch::stable::to(*bias, ScalarType::Float));
  }
  const float* bias() const { return data_or_null<float>(biases); }
};

bool takes_weights(
    const Tensor& wq, ScalarType dtype, const Tensor& wscale, const std::optional<Tensor>& bias) {
  return is_matrix(wq, dtype) && is_matrix(wscale, ScalarType::Float) && !needs_grad(wscale) &&
      (!bias || (bias->is_cpu() && !needs_grad(*bias)));
}

void check_scales(const Tensor& xscale, int64_t rows, bool or_one) {
  STD_TORCH_CHECK(
      xscale.numel() == rows || (or_one && xscale.numel() == 1), "xscale holds a value a row of x.");
}

Tensor int8_linear(
    const Tensor& xq, const Tensor& xscale, const Tensor& wq, const Tensor& wscale,
    std::optional<Tensor> bias, ScalarType out_dtype) {
  const bool taken = is_matrix(xq, ScalarType::Char) && is_matrix(xscale, ScalarType::Float) &&
      takes_weights(wq, ScalarType::Char, wscale, bias) && is_storage(out_dtype) &&
      xq.size(-1) <= kWidestExact && !needs_grad(xscale);
  if (!taken) {
    return call<Tensor>(
        "compilepass_native::int8_linear", xq, xscale, wq, wscale, bias, out_dtype);
  }
  const Weights weights(xq, wq, wscale, bias);
  const int64_t width = weights.width, rows = xq.numel() / width;
  check_scales(xscale, rows, false);
  const Tensor out = empty(xq, weights.columns, out_dtype);
  const Tensor x = dense(xq), xscales = dense(xscale);
  Int8Rows prepared(rows, width, data<float>(xscales));
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) prepared.set(r, data<int8_t>(x) + r * width);
  });
  with_storage(out_dtype, [&](auto storage) {
    using T = decltype(storage);
    multiply(
        prepared,
        Int8Linear<T>{
            data<int8_t>(weights.w), data<float>(weights.scales), weights.bias(), nullptr,
            mutable_data<T>(out), weights.columns});
  });
  return out;
}

Tensor int8_dynamic_linear(
    const Tensor& x, const Tensor& wq, const Tensor& wscale, std::optional<Tensor> bias,
    std::optional<Tensor> residual) {
  const bool taken = takes(x, residual.value_or(x)) &&
      takes_weights(wq, ScalarType::Char, wscale, bias) && x.size(-1) <= kWidestExact;
  if (!taken) {
    return call<Tensor>(
        "compilepass_native::int8_dynamic_linear", x, wq, wscale, bias, residual);
  }
  const Weights weights(x, wq, wscale, bias);
  const int64_t width = weights.width, rows = x.numel() / width;
  const Tensor out = empty(x, weights.columns, x.scalar_type()), from = dense(x);
  std::optional<Tensor> residuals;
  if (residual) {
    check_same_shape(out, *residual, "The result and residual");
    residuals = dense(*residual);
  }
  const std::unique_ptr<float[]> scales(new float[rows]);
  Int8Rows prepared(rows, width, scales.get());
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<int8_t[]> q(new int8_t[width]);
      for (int64_t r = begin; r < end; ++r) {
        const T* values = data<T>(from) + r * width;
        scales[r] = scale_of(largest_of(values, width), 127.0f);
        store_row<true>(q.get(), values, width, scales[r], Int8{});
        prepared.set(r, q.get());
      }
    });
    multiply(
        prepared,
        Int8Linear<T>{
            data<int8_t>(weights.w), data<float>(weights.scales), weights.bias(),
            data_or_null<T>(residuals), mutable_data<T>(out), weights.columns});
  });
  return out;
}

// A matrix as float32, copied where it is not.
template <class Widen>
std::unique_ptr<float[]> widened(int64_t rows, int64_t width, const Widen& widen) {
  std::unique_ptr<float[]> copy(new float[rows * width]);
  parallel_rows(rows, width, [&](int64_t begin, int64_t end) {
    for_each_vec((end - begin) * width, [&](int64_t i, auto part) {
      store(copy.get() + begin * width + i, widen(begin * width + i, part), part);
    });
  });
  return copy;
}

Tensor weight_only_int8_linear(
    const Tensor& x, const Tensor& wq, const Tensor& wscale, std::optional<Tensor> bias) {
  if (!takes(x) || !takes_weights(wq, ScalarType::Char, wscale, bias)) {
    return call<Tensor>("compilepass_native::weight_only_int8_linear", x, wq, wscale, bias);
  }
  const Weights weights(x, wq, wscale, bias);
  const int64_t width = weights.width, rows = x.numel() / width;
  const Tensor out = empty(x, weights.columns, x.scalar_type()), from = dense(x);
  with_storage(x.scalar_type(), [&](auto storage) {
    using T = decltype(storage);
    std::unique_ptr<float[]> copy;
    const float* values = nullptr;
    if constexpr (std::is_same_v<T, float>) {
      values = data<float>(from);
    } else {
      copy = widened(rows, width, [&](int64_t i, auto part) {
        return load(data<T>(from) + i, part);
      });
      values = copy.get();
    }
    using Factors = std::conditional_t<std::is_same_v<T, BFloat16>, InPairs, Singly>;
    multiply_widened<Int8Weight, Factors>(WidenedLinear<T>{
        values, nullptr, 0, data<uint8_t>(weights.w), data<float>(weights.scales), weights.bias(),
        mutable_data<T>(out), rows, width, weights.columns});
  });
  return out;
}

Tensor fp8_linear(
    const Tensor& xq, const Tensor& xscale, const Tensor& wq, const Tensor& wscale,
    std::optional<Tensor> bias, ScalarType out_dtype) {
  const bool taken = is_matrix(xq, ScalarType::Float8_e4m3fn) && xscale.is_cpu() &&
      xscale.scalar_type() == ScalarType::Float && !needs_grad(xq, xscale, wq) &&
      takes_weights(wq, ScalarType::Float8_e4m3fn, wscale, bias) && is_storage(out_dtype);
  if (!taken) {
    return call<Tensor>("compilepass_native::fp8_linear", xq, xscale, wq, wscale, bias, out_dtype);
  }
  const Weights weights(xq, wq, wscale, bias);
  const int64_t width = weights.width, rows = xq.numel() / width;
  check_scales(xscale, rows, true);
  const Tensor out = empty(xq, weights.columns, out_dtype);
  const Tensor from = dense(xq), xscales = dense(xscale);
  const auto values = widened(rows, width, [&](int64_t i, auto part) {
    uint8_t bytes[kAtOnce] = {};
    std::memcpy(bytes, data<uint8_t>(from) + i, part.count);
    return Fp8Weight::widen(widen_bytes(bytes));
  });
  with_storage(out_dtype, [&](auto storage) {
    using T = decltype(storage);
    multiply_widened<Fp8Weight, InPairs>(WidenedLinear<T>{
        values.get(), data<float>(xscales), xscale.numel() == 1 ? 0 : 1, data<uint8_t>(weights.w),
        data<float>(weights.scales), weights.bias(), mutable_data<T>(out), rows, width,
        weights.columns});
  });
  return out;
}

}  // namespace

Entries linear_entries() {
  return {
      {"fp8_linear", TORCH_BOX(&fp8_linear)},
      {"int8_dynamic_linear", TORCH_BOX(&int8_dynamic_linear)},
      {"int8_linear", TORCH_BOX(&int8_linear)},
      {"weight_only_int8_linear", TORCH_BOX(&weight_only_int8_linear)},
  };
}

}  // namespace compilepass
