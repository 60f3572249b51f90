// libFuzzer's entry for one target; ZINF_TARGET is its name.
#include "src/base/check.h"
#include "tests/fuzz/store_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  for (const zinf::tier::FuzzTarget& target : zinf::tier::fuzz_targets()) {
    if (target.name == ZINF_TARGET) {
      target.run({reinterpret_cast<const std::byte*>(data), size});
      return 0;
    }
  }
  ZINF_CHECK(false, "no target %s", ZINF_TARGET);
}
