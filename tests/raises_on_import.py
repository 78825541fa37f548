raise RuntimeError("as any mistake in a user's module does")
