// The Gumbel noise of vLLM's CPU sampler; `noise.py` calls it.

namespace {

typedef int64_t Longs __attribute__((vector_size(8 * W)));
typedef uint64_t Hashes __attribute__((vector_size(8 * W)));
typedef double Doubles __attribute__((vector_size(8 * W)));

template <class T> T mixed(T z) {  // SplitMix64's finalizer
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// -log(-log u) of W numbers u; v = 1 - u is given too, because the largest noise is near u = 1.
inline Floats gumbel(Floats u, Floats v) {
  Floats series = v * 0.125f;  // -log(1 - v) = v + v^2 / 2 + ...
  for (float c : {1.0f / 7, 1.0f / 6, 0.2f, 0.25f, 1.0f / 3, 0.5f, 1.0f}) series = (series + c) * v;
  return -logarithm(v < 0.25f ? series : -logarithm(u));
}

void noise_of(uint64_t seed, const int64_t* ids, int64_t count, float* out) {
  constexpr double UNIT = 1.0 / (1ll << 53);
  const uint64_t base = mixed(seed);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t lanes = std::min(int64_t(W), count - i);
    Hashes own = {};
    std::memcpy(&own, ids + i, lanes * sizeof(*ids));
    const Longs bits = (Longs)(mixed(base + (own + 1) * 0x9e3779b97f4a7c15u) >> 11);
    const Doubles u = (__builtin_convertvector(bits, Doubles) + 0.5) * UNIT;
    const Doubles v = (__builtin_convertvector((1ll << 53) - bits, Doubles) - 0.5) * UNIT;
    const Floats found =
        gumbel(__builtin_convertvector(u, Floats), __builtin_convertvector(v, Floats));
    std::memcpy(out + i, &found, lanes * sizeof(*out));
  }
}

}  // namespace

// out [rows, count], of the tokens `ids`; a row of zeros for seeds < 0.
extern "C" void gumbel_noise(const int64_t* seeds, int64_t rows, const int64_t* ids, int64_t count,
                             float* out) {
  constexpr int64_t PART = 2048;
  const int64_t parts = (count + PART - 1) / PART;
#pragma omp parallel for schedule(static) if (rows * count > 4096)
  for (int64_t task = 0; task < rows * parts; task++) {
    const int64_t row = task / parts, at = task % parts * PART;
    const int64_t size = std::min(PART, count - at);
    float* to = out + row * count + at;
    if (seeds[row] < 0) std::fill_n(to, size, 0.0f);
    else noise_of(seeds[row], ids + at, size, to);
  }
}
