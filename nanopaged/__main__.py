"""`python -m nanopaged` is a chat in the terminal; see `terminal/chat.py`."""

from nanopaged.terminal.chat import main

if __name__ == "__main__":
    main()
