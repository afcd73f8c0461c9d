"""Mutants: faults put into a copy of the source, for each of which a test must fail.

    python tests/mutants.py                 # all of them, two at a time
    python tests/mutants.py --only fedadmm  # those whose file, texts or tests contain this
    python tests/mutants.py --sound         # whether their tests pass where there is no fault

They say what tests are worth. Each replaces a text that its file holds exactly once, and is caught
if one of its tests fails. The exit code is 1 if less than 95 % are caught,
or if a text is not there once: the source has changed, and the mutant must change with it.
"""

from mutants_of_messages import MESSAGES
from mutants_of_rules import RULES
from trials import main

MUTANTS = [*RULES, *MESSAGES]

if __name__ == "__main__":
    raise SystemExit(main(MUTANTS, __doc__))
