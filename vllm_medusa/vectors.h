// Vectors of W floats, loaded from fp32, bf16 and fp16: the head of this package's C++ kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <vector>

#include <immintrin.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

template <class V> V load_as(const void* from) {
  V found;
  std::memcpy(&found, from, sizeof(V));
  return found;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }
inline Floats load(const float* from) { return load_as<Floats>(from); }
inline Floats load(const BFloat16* from) {
  return (Floats)(__builtin_convertvector(load_as<Halves>(from), Words) << 16);
}
inline Floats load(const Float16* from) {
#ifdef __AVX512F__
  return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#else
  return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#endif
}

inline void write(float* to, float x, bool) { *to = x; }
inline void write(Float16* to, float x, bool) { to->bits = _cvtss_sh(x, 0); }
inline uint16_t rounded_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void write(BFloat16* to, float x, bool truncate) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = truncate ? bits >> 16 : rounded_bits(x);
}
inline float rounded(float x) {
  uint32_t bits = uint32_t(rounded_bits(x)) << 16;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Relative error below 2e-7 (Cephes' polynomial); 0 for what would be subnormal, and for -inf.
inline Floats exponential(Floats x) {
  const Floats zero = {};
  Floats y = x < -87.0f ? zero - 87.0f : x;
  Floats n = y * 1.44269504f + 12582912.0f - 12582912.0f;
  Floats r = y - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = zero + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                  5.0000001201e-1f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  Floats power = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  return x < -87.0f ? zero : p * power;
}

// Absolute error below 1e-6, or relative below 2e-7 (Cephes' polynomial); for normal x > 0.
inline Floats logarithm(Floats x) {
  const Floats zero = {};
  const Ints bits = (Ints)x;
  Floats m = (Floats)((bits & 0x7fffff) | 0x3f000000);  // [0.5, 1)
  Floats e = __builtin_convertvector((bits >> 23) - 126, Floats);
  const Ints low = m < 0.707106781f;
  e = low ? e - 1.0f : e;
  m = (low ? m + m : m) - 1.0f;
  Floats p = zero + 7.0376836292e-2f;
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                  -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = p * m + c;
  const Floats z = m * m;
  return m + (p * m * z - e * 2.12194440e-4f - z * 0.5f) + e * 0.693359375f;
}

inline uint32_t any(Ints mask) {  // one bit a lane
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
  return _mm256_movemask_ps((__m256)mask);
#endif
}

// Memory from the start of a cache line: across lines, loads of tiles are up to twice as slow.
template <class T> struct Lines : std::allocator<T> {
  template <class U> struct rebind { using other = Lines<U>; };
  static constexpr std::align_val_t LINE{64};
  T* allocate(size_t count) { return static_cast<T*>(operator new(count * sizeof(T), LINE)); }
  void deallocate(T* memory, size_t) { operator delete(memory, LINE); }
};
template <class T> using Aligned = std::vector<T, Lines<T>>;

// Whether Linux lets this process use AMX tiles, if the CPU has them.
inline bool tiles_allowed() {
#ifdef __AMX_TILE__
  static const bool allowed = !syscall(SYS_arch_prctl, 0x1023, 18);  // ARCH_REQ_XCOMP_PERM
  return allowed;
#else
  return false;
#endif
}

// GCC 12's tile loads do not say that they read memory: before them, it may not delay stores.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// AMX tiles of the calling thread while it exists, if allowed: all have 16 rows of 64 bytes.
struct Tiles {
#ifdef __AMX_TILE__
  struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  Tiles() {
    static const Config config;
    finish_stores();
    if (tiles_allowed()) _tile_loadconfig(&config);
  }
  ~Tiles() {
    if (tiles_allowed()) _tile_release();
  }
#endif
};

// Lanes from `count` on are -inf.
template <class T> Floats load_some(const T* from, int64_t count) {
  T part[W] = {};
  std::memcpy(part, from, count * sizeof(T));
  float values[W];
  store(values, load(part));
  std::fill(values + count, values + W, -INFINITY);
  return load(values);
}

}  // namespace
