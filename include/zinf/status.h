// Status and Result<T>: how every expected failure travels in zinf.
//
// A Status is ok, or holds a code, a text for people and, where the operating
// system said no, its errno. Texts name the operation, the object, what was
// wanted and what was got. Copying is cheap. Thread-safe as a value.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace zinf {

enum class Code : std::uint8_t {
  kOk,
  kInvalid,      // the caller's request makes no sense as it stands
  kNotFound,     // a path or name that does not exist
  kPermission,   // the system forbids it
  kNoSpace,      // a disk or quota is full
  kOverBudget,   // a memory budget would be crossed
  kIo,           // a transfer failed or came back short
  kCorrupt,      // data was read, but it is not what was written
  kUnsupported,  // this system or file system cannot do it
  kCancelled,    // given up because its owner shut down
  kGone,         // another rank has ended
};

// "invalid", "no space", ...
std::string_view code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok

  static Status error(Code code, std::string text);

  // A failed system call: "OPERATION OBJECT: No space left on device (errno 28
  // ENOSPC)". The code follows from errnum.
  static Status system(std::string_view operation, std::string_view object,
                       int errnum);

  bool ok() const { return error_ == nullptr; }
  Code code() const { return error_ ? error_->code : Code::kOk; }
  int errnum() const { return error_ ? error_->errnum : 0; }
  const std::string& text() const;

  // The same error with "CONTEXT: " before its text, unless it begins so
  // already; ok stays ok.
  Status in(std::string_view context) const;
  // The same error with " (CAUSE)" after its text, when there is a cause.
  Status because(const Status& cause) const;

 private:
  friend struct Transfer;
  struct Error {
    Code code;
    int errnum;
    std::string text;
  };
  static Status make(Code code, int errnum, std::string text);

  std::shared_ptr<const Error> error_;  // null when ok
};

// A read or write that did not do what was asked. errnum 0 means that it came
// back short without an error (the end of the file).
struct Transfer {
  std::string_view operation;
  std::string_view path;
  std::uint64_t offset = 0;
  std::uint64_t wanted = 0;
  std::uint64_t got = 0;
  int errnum = 0;

  Status failed() const;
};

namespace detail {
[[noreturn]] void result_has_no_value(const Status& status);
}  // namespace detail

// A T, or the Status that says why there is none. value() on an error is a bug
// and ends the program with the error's text.
template <typename T>
class [[nodiscard]] Result {
 public:
  // NOLINTBEGIN(google-explicit-constructor): `return value;` must work
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : value_(std::move(status)) {
    if (std::get<Status>(value_).ok()) {
      detail::result_has_no_value(Status::error(
          Code::kInvalid, "Result made from an ok Status without a value"));
    }
  }
  // NOLINTEND(google-explicit-constructor)

  bool ok() const { return std::holds_alternative<T>(value_); }
  Status status() const { return ok() ? Status() : std::get<Status>(value_); }

  T& value() & { return checked(); }
  const T& value() const& { return const_cast<Result*>(this)->checked(); }
  T&& value() && { return std::move(checked()); }
  T& operator*() & { return checked(); }
  T* operator->() { return &checked(); }

 private:
  T& checked() {
    if (!ok()) detail::result_has_no_value(std::get<Status>(value_));
    return std::get<T>(value_);
  }

  std::variant<T, Status> value_;
};

}  // namespace zinf

// Returns from the enclosing function when EXPR, a Status, is an error.
#define ZINF_TRY(expr)                                          \
  do {                                                          \
    if (::zinf::Status zinf_status = (expr); !zinf_status.ok()) \
      return zinf_status;                                       \
  } while (false)

#define ZINF_CONCAT_INNER(a, b) a##b
#define ZINF_CONCAT(a, b) ZINF_CONCAT_INNER(a, b)

// ZINF_ASSIGN(auto file, open(path)): declares from a Result or returns its
// Status.
#define ZINF_ASSIGN(declaration, expr) \
  ZINF_ASSIGN_IMPL(ZINF_CONCAT(zinf_result_, __LINE__), declaration, expr)
#define ZINF_ASSIGN_IMPL(result, declaration, expr) \
  auto result = (expr);                             \
  if (!result.ok()) return result.status();         \
  declaration = std::move(result).value()
