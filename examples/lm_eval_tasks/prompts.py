"""What tasks beside this file borrow from lm-eval's own."""

from lm_eval.tasks.hellaswag.utils import process_docs as hellaswag

__all__ = ["hellaswag"]
