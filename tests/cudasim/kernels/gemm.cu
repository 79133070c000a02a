// An unmodified CUTLASS GEMM: bf16 x bf16 -> f32 on sm_80's tensor cores, three stages of cp.async.
#include <cutlass/bfloat16.h>
#include <cutlass/gemm/device/gemm.h>

using Element = cutlass::bfloat16_t;
using Gemm = cutlass::gemm::device::Gemm<
    Element, cutlass::layout::RowMajor, Element, cutlass::layout::ColumnMajor, float,
    cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<128, 128, 32>, cutlass::gemm::GemmShape<64, 64, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<float, 4, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3>;

// c [m, n] = alpha * a [m, k] x b [n, k]^T + beta * c; the result is cutlass::Status.
extern "C" int gemm(int m, int n, int k, const void* a, const void* b, float* c, float alpha,
                    float beta) {
  Gemm op;
  Gemm::Arguments args({m, n, k}, {static_cast<const Element*>(a), k},
                       {static_cast<const Element*>(b), k}, {c, n}, {c, n}, {alpha, beta});
  return static_cast<int>(op(args));
}
