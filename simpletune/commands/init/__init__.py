"""Which configuration suits a folder of pictures and this machine, and why?

``suggest`` prints and asks nothing, and imports no torch.
"""

from simpletune.commands.init.answers import Answers
from simpletune.commands.init.choices import Choice, Question, Reason, Suggestion, suggest, suggest_slider
from simpletune.commands.init.inspect_folder import FolderContents, inspect_folder

__all__ = [
    "Answers",
    "Choice",
    "FolderContents",
    "Question",
    "Reason",
    "Suggestion",
    "inspect_folder",
    "suggest",
    "suggest_slider",
]
