#include "src/base/start_thread.h"

#include <sys/resource.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "src/base/strf.h"

namespace zinf {

std::string thread_limit() {
  rlimit limit{};
  bool limited =
      getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  std::string user = limited
                         ? strf(
                               "this user may have %llu processes and threads "
                               "(RLIMIT_NPROC): raise that with ulimit -u",
                               static_cast<unsigned long long>(limit.rlim_cur))
                         : "RLIMIT_NPROC is unlimited";
  return user + "; a container may allow fewer (pids.max)";
}

Status start_thread(std::thread& thread, std::function<void()> body) {
  try {
    thread = std::thread([body = std::move(body)] {
      on_own_thread = true;
      body();
    });
    return {};
  } catch (const std::system_error& error) {
    int errnum = error.code().value();
    Status status = Status::system("start", "a thread", errnum);
    if (errnum != EAGAIN) return status;
    return status.because(Status::error(Code::kIo, thread_limit()));
  }
}

}  // namespace zinf
