// Runs a piece of a test in a child process, where it may give up rights and
// change limits without harm to the rest.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

namespace zinf {

inline constexpr int kCannotTry = 77;  // the child's word for a skip

// The child's exit code (-1 when it was killed). `body` returns "" when all is
// well, else what was wrong, which is printed.
inline int run_in_child(const std::function<std::string()>& body) {
  pid_t child = fork();
  if (child == 0) {
    std::string wrong = body();
    if (wrong == "skip") _exit(kCannotTry);
    if (!wrong.empty())
      std::fprintf(stderr, "in the child: %s\n", wrong.c_str());
    std::fflush(stderr);
    _exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace zinf

// In a test: runs the body in a child and expects that all was well.
#define ZINF_EXPECT_CHILD_OK(...)                                        \
  do {                                                                   \
    int zinf_code = ::zinf::run_in_child(__VA_ARGS__);                   \
    if (zinf_code == ::zinf::kCannotTry) GTEST_SKIP() << "needs rights"; \
    EXPECT_EQ(zinf_code, 0);                                             \
  } while (false)
