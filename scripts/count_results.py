"""Adds up the JUnit files of a folder: the tests skipped, then those failed with
the end of what they said, then one line "N passed, N failed, N skipped"."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

LINES = 15  # of a failed test's output


def told(case: ElementTree.Element) -> str:
    """The end of what a failed test said."""
    parts = [case.find("failure"), case.find("error"), case.find("system-out")]
    text = "\n".join(part.text or part.get("message", "") for part in parts if part is not None)
    return "\n".join("    " + line for line in text.strip().splitlines()[-LINES:])


def main() -> int:
    passed = 0
    failed: list[str] = []
    skipped: list[str] = []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{path.stem}: {case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"failed: {name}\n{told(case)}")
            elif case.find("skipped") is not None or case.get("status") == "notrun":
                skipped.append(f"skipped: {name}")
            else:
                passed += 1
    print("\n".join(skipped + failed))
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
