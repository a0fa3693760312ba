"""How are LoRA files exported, merged, mixed, extracted and resized from the command line?"""
