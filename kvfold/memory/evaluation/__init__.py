"""How well a memory answers: conversations made by rules, questions with one right value, and systems to compare."""
