"""Models that read a rollout as text, with a tokenizer of their own: as it grows, or whole when it has ended.

::

    growing    policy tokens -> GrowingText -> Retokenizer -> the model's tokens, streamed; a rewind where they change
    teacher    the same of a teacher, whose log-probs are shared out to the policy's tokens
    whole      policy tokens -> text -> the model's tokens, in batches of similar length
    rendering  prompt + response -> one text, by a chat template, joined, or as a pair
"""
