"""What a GPU would show in its first hour, shown without one."""
