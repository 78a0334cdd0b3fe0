// Entry of libFuzzer; built once per target, whose name comes from the build (ZENSYNC_FUZZ_TARGET).
// Place: fuzz. One thread; the bytes are libFuzzer's. A property that does not hold ends the
// process, and libFuzzer keeps the input.
#include "target.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const zensync::fuzz::Target* const kTarget =
      zensync::fuzz::find_target(ZENSYNC_FUZZ_TARGET);
  kTarget->run({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
