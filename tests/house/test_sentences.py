"""Sentences name the thing first; see docs/STYLE.md."""

import pytest
import sentences

pytestmark = pytest.mark.xdist_group("trees")

PERCENT = 1.5  # of all sentences, in documents and in docstrings


def told(found):
    return f"{found.percent:.2f} %:\n" + "\n".join(found.headless)


def test_documents_name_the_thing_first():
    found = sentences.count(sentences.DOCUMENTS)
    assert found.percent <= PERCENT, told(found)


def test_docstrings_name_the_thing_first():
    found = sentences.count(sentences.MODULES)
    assert found.percent <= PERCENT, told(found)


def test_sentences_are_told_apart():
    text = """# What it is

Of these, two count. It ends here: What follows counts. `Who` is code.

| What | Who |
| --- | --- |

```python
What = 1
```

- That one
  goes on. "Else" is quoted, version 1.5 is no end.
"""
    assert [
        sentence for sentence in sentences.sentences(text) if sentences.is_headless(sentence)
    ] == [
        "What it is",
        "Of these, two count.",
        "What follows counts.",
        "That one goes on.",
        '"Else" is quoted, version 1.5 is no end.',
    ]
    module = '"""Who."""\ndef f():\n    """What."""\n'
    assert list(sentences.docstrings(module)) == ["Who.", "What."]
