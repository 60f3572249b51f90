"""Adds up the JUnit files of a folder and prints "N passed, N failed, N skipped"."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def main() -> int:
    passed = failed = skipped = 0
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.find("skipped") is not None or case.get("status") == "notrun":
                skipped += 1
                print(f"skipped: {path.stem}: {case.get('name')}")
            else:
                passed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
